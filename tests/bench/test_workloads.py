"""Workloads, pinned: digests of the tokens that the published times of other engines were measured on."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from quire.bench import workloads
from quire.types.errors import ConfigError

# fmt: off
GOLDEN: list[tuple[str, dict[str, Any], str]] = [
    ("chat", {},
     "4560c6e658b800445872460dd386754d8925889464fdd1d297d843cc9bde5b06"),
    ("chat", {"n": 50, "seed": 7, "vocab": 49152},
     "e6ad2fc38368bcce1349929d46bb7007a3f4be6c8649a8b27aac2531425ff763"),
    ("chat", {"n": 20, "seed": 3, "vocab": 500},
     "3f57285dfb4c5f57695385f42f8121e4c3b32507fa5a6bd5b09770d4598a5c89"),
    ("fixed", {"n": 9, "n_in": 33, "n_out": 5},
     "a5dac4ad198f172d8e1b0ab7d42c255299a3605da20a59ef95f049248855cdb1"),
    ("fixed", {"n": 32, "n_in": 128, "n_out": 256, "seed": 42, "vocab": 49152},
     "44241bcace20e52666befad642ed2afdd201f09f13341118db593d6c788377fc"),
    ("shared_prefix", {"n": 16, "prefix": 100, "n_in": 7, "n_out": 3},
     "adeb5c8f7a28b732791f359ca78960ff9103837b19cdd855005cf09589828071"),
    ("shared_prefix", {"n": 64, "prefix": 512, "n_in": 16, "n_out": 16, "seed": 5, "vocab": 49152},
     "eb7afaf73a2990eb3e1e0e05b17a2658ca4cd1cac8beba057d2984fe38343262"),
    ("multi_turn", {},
     "49572732da0f12f9aa5ecd8d65cf52b580cf3c0927c3121b4f2079a283d17f4e"),
    ("multi_turn", {"clients": 3, "rounds": 2, "n_in": 40, "n_out": 8, "seed": 9, "vocab": 2000},
     "5bedf1b97c1f92b8f95a73ea870a0e71c8c559a368cd35f7e3c3aa4f684505a9"),
    ("trace_like", {"name": "azure2023_conv", "n": 2000, "seed": 0},
     "e1b17c9f0452cdde93f8ef046e3ca1a722d60d59737672cb4b2802d5cb08069e"),
    ("trace_like", {"name": "azure2023_code", "n": 2000, "seed": 1},
     "4f6188a3e6f32a37d2b00268f81289d0150f23ba01efa219a6cda0f8e94345c3"),
    ("trace_like", {"name": "mooncake_conversation", "n": 2000, "seed": 2},
     "55e04306a9b31eda3457a34fa0005d62183cf089e0c67ce1e3df6b9e905f7acb"),
    ("trace_like", {"name": "mooncake_synthetic", "n": 2000, "seed": 3},
     "bed82faf91e40826b13d2b99b6bead55036eb04cc4cf3b17bd30663f68ca6481"),
]
H200 = {
    "chat1000": "4560c6e658b800445872460dd386754d8925889464fdd1d297d843cc9bde5b06",
    "decode_bs1": "408b69d2c0a6c6eaf8cbe217ac3585f927fbe0df262252ce8536baf4336e390b",
    "decode_bs8": "81192ebf3f3c56bd10d167a59ecac6434860b734f3ae9a565bed18fc66e722c5",
    "decode_bs32": "edb1ef4659857ca139b3d2c9c4c9510791c2195960e74489c8e6b50c55d93774",
    "decode_bs128": "b5298b544f0098dd78b28b318e4faa7980d850d307ba16726da673f73c1f2fe9",
    "decode_bs256": "8d296c4fff3f69da3b97bd2bf6565a148578cf8c28d5308001ac32bf30dd72a8",
    "prefill_8x8192": "26f5dff1f934258ded7326b1f002290353a12b8bedda460a427e7a7bfe521e0b",
    "prefill_1x2048": "aa33d68e93581ed3991c8d47c529d9ea0d64904c8bef785f3faa3902cd053b55",
    "prefill_1x512": "ad2c1755e16ba2e41b6d26bfccfa441622bb9a8455ac86bef95563b4f1e45e2d",
    "long_bs32_ctx8192": "6931fd5da44b64163c9bc77e530e5bc8066b682497e57b6c113006acbac02ee1",
    "prefix_256x2048": "af7e3d784554555686b15d3ad2f43bbfb76b9cc88c73857d92837ae6ab7c02f9",
}
# fmt: on


def digest(work: Any) -> str:
    return hashlib.sha256(json.dumps(work).encode()).hexdigest()


@pytest.mark.parametrize(("name", "arguments", "want"), GOLDEN)
def test_tokens_are_the_published_ones(name: str, arguments: dict[str, Any], want: str) -> None:
    assert digest(getattr(workloads, name)(**arguments)) == want


def test_anchor_runs_are_the_published_ones() -> None:
    assert {name: digest(make()) for name, make in workloads.H200.items()} == H200


def test_shapes_say_what_they_promise() -> None:
    chat = workloads.chat(300, seed=2, vocab=49152)
    assert all(4 <= len(job.prompt) <= 1024 and 4 <= job.output_len <= 1024 for job in chat)
    assert all(1000 <= token < 49152 for job in chat for token in job.prompt)
    prefixed = workloads.shared_prefix(4, 50, 6, 7, vocab=300)
    assert len({tuple(job.prompt[:50]) for job in prefixed}) == 1
    assert len({tuple(job.prompt) for job in prefixed}) == 4
    assert all(len(job.prompt) == 56 and job.output_len == 7 for job in prefixed)
    rounds = workloads.multi_turn(clients=3, rounds=2, n_in=5, n_out=4)
    assert [[(len(job.prompt), job.output_len) for job in work] for work in rounds] == [[(5, 4)] * 3] * 2


def test_unknown_trace_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"no trace is called 'bing'.*azure2023_code.*mooncake_synthetic"):
        workloads.trace_like("bing", 1)
