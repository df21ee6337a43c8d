"""`quire bench serve` and guidellm against the same server, turn by turn: do two clients see the same latencies?

pip install guidellm            # in an environment of its own; --guidellm names its program
python scripts/compare_clients.py http://127.0.0.1:8000 --tokenizer DIRECTORY --guidellm guidellm --rounds 3

Prompts and answers of the same lengths, so many at a time. What guidellm calls ITL, the mean of (last token - first)
over (tokens - 1) of each request, is called TPOT here, as in vLLM's benchmark; its TPOT counts the first token too and
has no counterpart here. TTFT counts from when a request is sent in both, in a closed loop. DIRECTORY has the model's
tokenizer, as transformers writes it: guidellm makes up texts by it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

FIGURES = ("ttft_s", "tpot_s", "output_tok_s")
WITHIN = 0.05


def ours(known: argparse.Namespace, path: Path, seed: int) -> dict[str, float]:
    command = [sys.executable, "-m", "quire", "bench", "serve", known.url, "--workload", "fixed", "--json", str(path)]
    command += ["--num", known.num, "--in", known.prompt, "--out", known.outputs, "--concurrency", known.concurrency]
    command += ["--seed", seed]  # prompts of a run before would be found in the prefix cache
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
    (phase,) = json.loads(path.read_text())["phases"]
    return {
        "ttft_s": phase["ttft_s"]["mean"],
        "tpot_s": phase["tpot_s"]["mean"],
        "output_tok_s": phase["output_tok_s"],
    }


def theirs(known: argparse.Namespace, path: Path, seed: int) -> dict[str, float]:
    command = [
        *(known.guidellm, "run", "--disable-console"),
        *("--backend", f"kind=openai_http,target={known.url},request_format=/v1/completions"),
        *("--profile", f"kind=concurrent,streams={known.concurrency}"),
        *("--constraint", f"kind=max_requests,count={known.num}"),
        *("--tokenizer", f"kind=hf_auto,model={known.tokenizer}"),
        *("--data", f"kind=synthetic_text,prompt_tokens={known.prompt},output_tokens={known.outputs}"),
        *("--seed", f"kind=static,value={seed}"),
        *("--output", f"kind=json,path={path}"),
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    (benchmark,) = json.loads(path.read_text())["benchmarks"]
    metrics = benchmark["metrics"]

    def mean(name: str) -> float:
        return float(metrics[name]["successful"]["mean"])

    return {
        "ttft_s": mean("time_to_first_token_ms") / 1000,
        "tpot_s": mean("inter_token_latency_ms") / 1000,
        "output_tok_s": mean("output_tokens_per_second"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--guidellm", default="guidellm", help="the program")
    parser.add_argument("--tokenizer", required=True, help="directory or name that transformers knows")
    parser.add_argument("--num", type=int, default=100, help="requests of each run")
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--outputs", type=int, default=32, help="tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    known = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {"quire": [], "guidellm": []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(known.rounds):
            for name, run in (("quire", ours), ("guidellm", theirs)):
                found[name].append(run(known, Path(folder) / f"{name}{number}.json", number + 1))
                print(name, found[name][-1], flush=True)
    result: dict[str, Any] = dict(found)
    for figure in FIGURES:
        mine, other = (median(one[figure] for one in found[name]) for name in ("quire", "guidellm"))
        result[figure] = {"quire": mine, "guidellm": other, "ratio": mine / other}
        print(f"{figure}: quire {mine:.4f}, guidellm {other:.4f}, {mine / other - 1:+.1%}", end="")
        print("" if abs(mine / other - 1) <= WITHIN else f"  beyond {WITHIN:.0%}")
    if known.json:
        known.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
