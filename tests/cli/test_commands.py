"""The commands as a user types them, in this process."""

import json
import re
import threading
from dataclasses import fields
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from typer.testing import CliRunner

import quire
from quire.cli.main import app, main
from quire.types.config import EngineOptions, flat_fields
from quire.types.errors import ConfigError, InputError, ModelNotFoundError, QuireError
from quire.types.option_checks import parse_size
from quire.types.option_names import COUNTERPARTS
from quire.types.serving import ServeOptions


def run(*words, **options):
    return CliRunner().invoke(app, list(words), catch_exceptions=False, env={"COLUMNS": "160"}, **options)


def test_every_option_is_a_flag_with_its_help():
    text = run("serve", "--help-all").output
    for field in flat_fields():
        if not field.metadata.get("positional"):
            assert "--" + field.name.replace("_", "-") in text


def test_help_names_extras_whole():
    text = run("serve", "--help-all").output
    assert all(f"quire[{extra}]" in text for extra in ("ray", "otel", "grpc"))


def test_simulation_options_without_effect_are_refused():
    few = "--workload chat --num 2 --workers 1"
    for words, problem in (
        ("--startup 5", "startup has no effect without max_replicas or min_replicas"),
        ("--slo-give-up", "slo_give_up has no effect without slo_ttft"),
        ("--no-switch-roles", "switch_roles has no effect without prefill_replicas"),
        ("--think 2", "think has no effect without clients"),
        ("--loads 0.5", "loads has no effect without compare"),
        ("--clients 2 --rate 3", "rate has no effect beside clients"),
        ("--clients 2 --rate-scale 3", "rate_scale has no effect beside clients"),
        ("--clients 2 --arrivals gamma:0.5", "arrivals has no effect beside clients"),
        ("--clients 2 --router least-load", "router has no effect beside clients"),
        ("--oracle --scheduler fcfs", "oracle has no effect beside scheduler fcfs: it looks at no lengths"),
        ("--oracle --scheduler mlfq", "oracle has no effect beside scheduler mlfq: it looks at no lengths"),
        ("--oracle --length-predictor constant", "oracle has no effect beside length_predictor"),
        ("--scheduler fair --max-wait 5", "max_wait has no effect beside scheduler fair"),
        ("--compare fcfs --router least-load", "router has no effect beside compare"),
        ("--compare fcfs --router bogus", "router has no effect beside compare"),
        ("--compare fcfs --think 2", "think has no effect without clients"),
        ("--compare fcfs --max-replicas 2", "max_replicas has no effect beside compare"),
        ("--compare sjf,fcfs:oracle", "oracle has no effect beside scheduler fcfs"),
    ):
        with pytest.raises(ConfigError, match=problem):
            run("simulate", *few.split(), *words.split())
    with pytest.raises(ConfigError, match="arrivals has no effect without rate or workload or compare"):
        run("simulate", "--trace", "a.csv", "--arrivals", "gamma:0.5")


def test_simulation_options_with_an_effect_are_taken(tmp_path):
    (tmp_path / "t.csv").write_text("arrival_s,input_tokens,output_tokens\n0,5,2\n1,6,3\n")
    for words in (
        "--workload chat --startup 5 --max-replicas 2 --slo-give-up --slo-ttft 9",
        "--workload chat --clients 2 --think 2",
        "--workload chat --oracle --max-wait 5",
        f"--trace {tmp_path / 't.csv'} --rate 2 --arrivals gamma:0.5",
    ):
        assert run("simulate", *words.split(), "--num", "2", "--workers", "1").exit_code == 0


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--rate 0", "rate must be a finite number above 0, got 0"),
        ("--rate inf", "rate must be a finite number above 0, got inf"),
        ("--kv-scale nan", "kv_scale must be a finite number above 0, got nan"),
        ("--rate-scale nan", "rate_scale must be a finite number above 0, got nan"),
        ("--clients 2 --think inf", "think must be a finite number"),
        ("--router bogus", "router must be one of cache-aware, .*, got 'bogus'"),
        ("--scheduler bogus", "scheduler must be one of"),
        ("--compare fcfs,bogus", "scheduler must be one of"),
        ("--compare sjf:orcale", "scheduler 'sjf:orcale' cannot be imported"),
        ("--compare fcfs --loads 0.5,nan", "loads are numbers above 0"),
        ("--device b100", "a cost model is h200, or a file of .*; got 'b100'"),
        ("--json missing/f.json", "cannot write missing/f.json: there is no folder missing"),
        ("--html missing/f.html", "there is no folder missing"),
        ("--json /", "cannot write /: it is a folder"),
    ],
)
def test_what_cannot_be_simulated(words, problem):
    with pytest.raises(ConfigError, match=problem):
        run("simulate", "--workload", "chat", "--num", "2", "--workers", "1", *words.split())


def test_help_shows_what_most_people_need():
    for name in ("serve", "run"):
        text = run(name, "-h").output
        assert text == run(name, "--help").output and "--help-all" in text and f"quire {name} qwen3:8b" in text
        assert "--kv-memory" in text and "--kv-fsync" not in text and "--snapshot-tokens" not in text
    assert "--host" in run("serve", "-h").output and "--hang-timeout" not in run("serve", "-h").output
    assert "--kv-fsync" in run("run", "--help-all").output


NO_MODEL = "/nonexistent/model"
WRONG = [
    ["run", NO_MODEL, "hello"], ["run", "", "hello"], ["run", "a/b/c", "hello"], ["run", "\udcff", "hello"],
    ["run", "smollm2-135m", "\udcff"], ["run", "smollm2-135m", "hi", "--temperature", "nan"],
    ["run", "smollm2-135m", "hi", "--max-tokens", "-1"], ["run", "smollm2-135m", "hi", "--seed", "9" * 40],
    ["run", "smollm2-135m", "hi", "--kv-memory", "1e99G"], ["run", "smollm2-135m", "hi", "--max-model-len", "1"],
    ["run", "smollm2-135m", "hi", "--device", "cuda:99"], ["run", "smollm2-135m", "hi", "--lora", "x"],
    ["run", "/etc", "hello"], ["run", "/etc/passwd", "hello"], ["run", "x" * 5000, "hello"],
    ["show", NO_MODEL], ["show", "../.."], ["show", "/dev/null"], ["rm", "nothing"], ["pull", "\0"],
    ["doctor", "--context", "0"], ["doctor", NO_MODEL], ["ps", "127.0.0.1:1"], ["ps", "http://["], ["ps", "::::"],
    ["cache", "stats", "file:///etc/passwd"], ["keys", "new", ""], ["batch", NO_MODEL, "out"], ["serve", NO_MODEL],
    ["serve", "--port", "99999"], ["serve", "--api-keys", NO_MODEL], ["serve", "--cors", "x"], ["catalog", "\udcff"],
    ["quantize", NO_MODEL], ["simulate", NO_MODEL], ["profile", NO_MODEL], ["bench", "throughput", "--num", "-1"],
]  # fmt: skip


@pytest.mark.parametrize("words", WRONG, ids=lambda words: " ".join(words)[:40].encode("ascii", "replace").decode())
def test_no_argument_leads_to_a_traceback(words, monkeypatch, capsys, default_model, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("sys.argv", ["quire", *words])
    with pytest.raises(SystemExit) as left:
        main()
    said = capsys.readouterr()
    assert left.value.code in (0, 1, 2) and "Traceback" not in said.err
    if left.value.code == 1:
        assert said.err.splitlines()[-1].startswith("error: ") or "error: " in said.err


def test_the_model_of_a_running_server():
    model = {"name": "qwen3:8b", "size": 5 << 30, "size_vram": 0, "context_length": 4096,
             "details": {"parameter_size": "8B", "quantization_level": "Q4_K"}}  # fmt: skip

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.headers["Authorization"] == "Bearer k" else 401)
            self.end_headers()
            self.wfile.write(json.dumps({"models": [model]}).encode())

        def log_message(self, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            address = f"127.0.0.1:{server.server_port}"
            text = run("ps", address, "--key", "k").output
            assert json.loads(run("ps", address, "--key", "k", "--json").stdout) == [model]
            with pytest.raises(QuireError, match="answered 401"):
                run("ps", address)
        finally:
            server.shutdown()
            thread.join()
    assert "qwen3:8b" in text and "5.00 GiB" in text and "4,096" in text and "Q4_K" in text and "CPU" in text


def test_piped_text_goes_before_the_question(default_model):
    done = run("run", "smollm2-135m", "Answer in one sentence.", "--temperature", "0", "--max-tokens", "12",
               "--verbose", input="What is gravity?\n")  # fmt: skip
    alone = run("run", "smollm2-135m", "What is gravity?\n\nAnswer in one sentence.", "--temperature", "0",
                "--max-tokens", "12", input="")  # fmt: skip
    assert done.stdout == alone.stdout and "Gravity" in done.stdout and "tok/s" in done.stderr
    with pytest.raises(InputError, match="no question"):
        run("run", "smollm2-135m", input=" \n")


def test_options_of_other_engines_are_known_by_name():
    with pytest.raises(ConfigError, match="it is called kv_memory"):
        run("serve", "--gpu-memory-utilization=0.9")
    with pytest.raises(ConfigError, match="it is called context_parallel here"):
        run("run", "--decode-context-parallel-size", "2", "hello")
    with pytest.raises(ConfigError, match="dtype must be"):
        run("run", "--lora-modules", "x=/nonexistent", "--dtype", "x")  # of both engines
    with pytest.raises(ConfigError, match="called max_seqs here"):
        EngineOptions.of(max_num_seqs=3)
    with pytest.raises(ConfigError, match="did you mean kv_memory"):
        EngineOptions.of(kv_memry="1G")
    with pytest.raises(ConfigError, match="known options: ageing"):
        EngineOptions.of(zzz=1)
    ours = {field.name for field in (*flat_fields(), *fields(ServeOptions))}
    assert not ours & set(COUNTERPARTS)
    said = {word for text in COUNTERPARTS.values() for word in re.split(r"\W+", text.partition("(")[0]) if word}
    assert said - ours <= {"and", "or", "QUIRE_CACHE", "in", "the", "environment"}


def test_the_public_names_are_shown():
    assert {"LLM", "AsyncLLM", "SamplingParams"} <= set(dir(quire)) == set(quire.__all__)


def test_the_version():
    assert run("--version").output == f"quire {quire.__version__}\n"


def test_one_answer(default_model):
    done = run("run", "smollm2-135m", "What is gravity?", "--temperature", "0", "--max-tokens", "12")
    assert done.exit_code == 0 and "Gravity is" in done.output


def test_a_question_on_standard_input(default_model):
    done = run("run", "--temperature", "0", "--max-tokens", "12", input="What is gravity?")
    assert done.exit_code == 0 and "Gravity is" in done.output


def test_models_are_listed_and_shown(default_model):
    assert "smollm2-135m" in run("list").output
    shown = run("show", "smollm2-135m").output
    assert "134,515,008" in shown and "Q4_1" in shown and "8,192" in shown


def test_doctor_says_what_does_not_fit(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 65536, "num_hidden_layers": 80,'
        ' "intermediate_size": 262144, "num_attention_heads": 128, "vocab_size": 32000, "rms_norm_eps": 1e-5,'
        ' "max_position_embeddings": 4096}'
    )
    text = run("doctor", str(tmp_path), "--random-weights").output
    assert "does not fit" in text and "of memory free" in text and "-1" not in text


def test_doctor_says_what_and_why(default_model):
    text = run("doctor", "--context", "1000").output
    assert "decoder" in text and "sequences of 1000 tokens" in text and "KV per token" in text


def test_unknown_models_name_the_remedy():
    with pytest.raises(ModelNotFoundError, match="smollm2-135m"):
        run("run", "smollm2-135n", "hello")
    with pytest.raises(ModelNotFoundError, match='quire run smollm2-135m "Why is'):
        run("run", "Why is the sky blue?")


@pytest.mark.parametrize("scheduler", ["fcfs", pytest.param("static", marks=pytest.mark.slow)])
def test_throughput_reports_everything(default_model, tmp_path, scheduler):
    out = tmp_path / "out.json"
    run(
        "bench", "throughput", "--workload", "shared_prefix", "--num", "6", "--prefix", "64", "--in", "8", "--out", "4",
        "--kv-memory", "64M", "--scheduler", scheduler, "--json", str(out),
    )  # fmt: skip
    found = json.loads(out.read_text())
    assert found["output_tokens"] == 24 and found["input_tokens"] == 6 * 72
    assert found["output_tok_s"] == pytest.approx(24 / found["seconds"])
    for name in ("ttft_s", "tpot_s", "itl_s"):
        assert found[name]["p50"] <= found[name]["p99"]
    assert (found["prefix_hit_rate"] > 0.7) == (scheduler == "fcfs")
    assert 0 < found["kv_waste"] < 0.5 and found["kv_pages_peak"] > 0


def test_options_survive_the_way_to_the_engine_process():
    options = EngineOptions.of(model="m", page_size=32, prefix_cache=False, kv_memory="1G", max_waiting=3)
    assert EngineOptions.of(**json.loads(json.dumps(options.flat()))) == options


@pytest.mark.parametrize(("text", "size"), [("512M", 512 << 20), ("8GiB", 8 << 30), ("1.5k", 1536), ("7", 7)])
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "M", "-1G", "0", "12X", "nanG", "infG"])
def test_sizes_that_are_none(text):
    with pytest.raises(ConfigError):
        parse_size(text)
