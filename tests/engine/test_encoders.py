"""Encoders: embeddings, scores of pairs and classes as transformers', alone and batched, over `LLM` and over HTTP."""

from __future__ import annotations

import json
import math

import httpx
import pytest
import tiny_encoders
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from quire import LLM, AsyncLLM, SamplingParams
from quire.serve.http.server import background_server
from quire.types.errors import ContextLengthError, InputError, ModelFileError

TEXTS = [
    "the cat sat on the mat",
    "a dog",
    "the red cat ran under the blue tree who is not a dog",
    "where",
    "cat " * 40,
]
PAIRS = [("where is the cat", "the cat sat on the mat"), ("where is the cat", "a dog"), ("who ran", "cat " * 30)]
TOKENS = tiny_encoders.tokenizer()


def states(model, text):
    with torch.inference_mode():
        return model.base_model(**inputs(model, text)).last_hidden_state[0]


def inputs(model, *texts):
    made = TOKENS(*texts, return_tensors="pt", truncation=True, max_length=64)
    if model.config.type_vocab_size == 1:
        del made["token_type_ids"]
    return made


def logits(model, *texts):
    with torch.inference_mode():
        return model(**inputs(model, *texts)).logits[0]


def close(ours, theirs, tolerance=1e-4):
    torch.testing.assert_close(torch.tensor(ours), theirs.float(), atol=tolerance, rtol=tolerance)


def unit(vector):
    return vector / vector.norm()


@pytest.mark.parametrize("make", [tiny_encoders.bert, tiny_encoders.xlm_roberta])
@pytest.mark.parametrize(
    ("mode", "normalize"), [("mean_tokens", True), ("cls_token", False), ("mean_tokens", False), (None, True)]
)
def test_embeddings_are_pooled_as_files_say(tmp_path, make, mode, normalize):
    theirs = make()
    with LLM(str(tiny_encoders.save(theirs, tmp_path, mode=mode, normalize=normalize)), threads=1) as llm:
        together = llm.embed(TEXTS)
        for text, ours in zip(TEXTS, together, strict=True):
            found = states(theirs, text)
            pooled = found[0] if mode == "cls_token" else found.mean(0)
            close(ours, unit(pooled) if normalize else pooled)
            close(llm.embed(text)[0], torch.tensor(ours), 1e-5)
        last, raw = llm.embed(TEXTS[0], "last"), llm.embed(TEXTS[0], normalize=False)
        close(last[0], unit(states(theirs, TEXTS[0])[-1]) if normalize else states(theirs, TEXTS[0])[-1])
        assert math.hypot(*raw[0]) != pytest.approx(1, abs=0.01)


def test_older_names_of_norms_and_what_is_not_used(tmp_path):
    theirs = tiny_encoders.filled(hf.BertForMaskedLM(hf.BertConfig(**tiny_encoders.SIZES)))
    tiny_encoders.save(theirs, tmp_path)
    file = tmp_path / "model.safetensors"
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    tensors = {
        name.replace(end, old[end]) if (end := ".".join(name.split(".")[-2:])) in old else name: tensor
        for name, tensor in load_file(file).items()
    }
    assert any(name.endswith("gamma") for name in tensors) and any(name.startswith("cls.") for name in tensors)
    save_file(tensors, file, {"format": "pt"})
    with LLM(str(tmp_path), threads=1) as llm:
        close(llm.embed(TEXTS[0])[0], unit(states(theirs, TEXTS[0]).mean(0)))


def test_a_step_takes_rows_whole(tmp_path):
    """However many tokens a step may have, and whatever chunks prompts are cut into elsewhere."""
    theirs = tiny_encoders.bert()
    tiny_encoders.save(theirs, tmp_path)
    with LLM(str(tmp_path), threads=1, prefill_chunk=3, max_batch_tokens=8, max_seqs=4) as llm:
        for text, ours in zip(TEXTS * 3, llm.embed(TEXTS * 3), strict=True):
            close(ours, unit(states(theirs, text).mean(0)))
        stats = llm.stats()
        assert stats.cached_tokens == 0 and stats.preemptions == 0


@pytest.mark.parametrize("make", [tiny_encoders.bert, tiny_encoders.xlm_roberta])
def test_pairs_are_scored_by_the_head(tmp_path, make):
    theirs = make(labels=1)
    tiny_encoders.save(theirs, tmp_path)
    with LLM(str(tmp_path), threads=1) as llm:
        wanted = [logits(theirs, *pair).sigmoid()[0] for pair in PAIRS]
        close(llm.score([one for one, _ in PAIRS], [other for _, other in PAIRS]), torch.stack(wanted))
        order = llm.rerank(PAIRS[0][0], [PAIRS[1][1], PAIRS[0][1]])
        assert [index for index, _ in order] == [int(wanted[0] > wanted[1]), int(wanted[0] <= wanted[1])]
        assert len(llm.rerank(PAIRS[0][0], [PAIRS[1][1], PAIRS[0][1]], top_n=1)) == 1
        with pytest.raises(InputError, match="2 texts cannot be paired with 3"):
            llm.score(["a", "b"], ["c", "d", "e"])


def test_cross_encoders_may_name_their_activation(tmp_path):
    theirs = tiny_encoders.bert(labels=1, sbert_ce_default_activation_function="torch.nn.modules.linear.Identity")
    tiny_encoders.save(theirs, tmp_path)
    with LLM(str(tmp_path), threads=1) as llm:
        close(llm.score(*PAIRS[0]), logits(theirs, *PAIRS[0]))


def test_without_a_head_pairs_are_scored_by_their_embeddings(tmp_path):
    theirs = tiny_encoders.bert()
    tiny_encoders.save(theirs, tmp_path, mode="mean_tokens")
    with LLM(str(tmp_path), threads=1) as llm:
        one, other = (unit(states(theirs, text).mean(0)) for text in PAIRS[0])
        close(llm.score(*PAIRS[0]), (one @ other)[None])
        with pytest.raises(InputError, match="no classification head"):
            llm.classify("a cat")


def test_classes(tmp_path):
    theirs = tiny_encoders.bert(labels=3, id2label={0: "red", 1: "green", 2: "blue"})
    tiny_encoders.save(theirs, tmp_path)
    with LLM(str(tmp_path), threads=1) as llm:
        assert llm.info.pooling.labels == ["red", "green", "blue"]
        for text, ours in zip(TEXTS, llm.classify(TEXTS), strict=True):
            close(ours, logits(theirs, text).softmax(0))
        with pytest.raises(InputError, match="3 classes"):
            llm.score("a", "b")


@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
def test_decoders_with_a_classification_head(tmp_path, kind):
    """The last token's scores, whatever chunks the prompt is cut into, and on a prefix hit."""
    sizes = tiny_encoders.SIZES | {"num_key_value_heads": 2, "num_labels": 3, "pad_token_id": 1, "head_dim": 8}
    theirs = tiny_encoders.filled(
        getattr(hf, f"{kind}ForSequenceClassification")(getattr(hf, f"{kind}Config")(**sizes))
    )
    tiny_encoders.save(theirs, tmp_path)
    ids = [TOKENS(text)["input_ids"] for text in TEXTS]
    with LLM(str(tmp_path), threads=1, prefill_chunk=7, page_size=4) as llm:
        for _ in range(2):
            for tokens, ours in zip(ids, llm.classify(ids), strict=True):
                with torch.inference_mode():
                    close(ours, theirs(torch.tensor([tokens])).logits[0].softmax(0))
        assert llm.stats().cached_tokens > 8


def test_what_an_encoder_refuses(tmp_path):
    tiny_encoders.save(tiny_encoders.bert(), tmp_path)
    with LLM(str(tmp_path), threads=1) as llm:
        longest = llm.info.max_model_len
        assert longest == 66 and len(llm.embed([[5] * longest])) == 1
        with pytest.raises(ContextLengthError, match="67 tokens but the model takes 66"):
            llm.embed([[5] * (longest + 1)])
        with pytest.raises(InputError, match="is an encoder"):
            llm.generate("the cat", SamplingParams(max_tokens=3))


@pytest.mark.parametrize("mode", ["max_tokens", "weightedmean_tokens"])
def test_other_poolings_are_refused_by_name(tmp_path, mode):
    path = tiny_encoders.save(tiny_encoders.bert(), tmp_path, mode=mode)
    file = path / "1_Pooling" / "config.json"
    file.write_text(json.dumps({f"pooling_mode_{mode}": True}))
    with pytest.raises(ModelFileError, match=mode):
        LLM(str(path), threads=1)


# ---- over HTTP ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["head", "embeddings"])
def served(request, tmp_path_factory):
    """(their model, a client of a server of it)"""
    path = tmp_path_factory.mktemp("served") / "tiny"
    theirs = tiny_encoders.bert(labels=1) if request.param == "head" else tiny_encoders.bert()
    tiny_encoders.save(theirs, path, mode=None if request.param == "head" else "mean_tokens")

    async def frontend():
        return await AsyncLLM.open(str(path), threads=1)

    with background_server(frontend) as url, httpx.Client(base_url=url) as client:
        yield theirs, client


def expected(theirs, one, other):
    if hasattr(theirs, "classifier"):
        return logits(theirs, one, other).sigmoid()[0]
    return torch.dot(*(unit(states(theirs, text).mean(0)) for text in (one, other)))


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_score_route(served, path):
    theirs, client = served
    body = {"model": "tiny", "text_1": PAIRS[0][0], "text_2": [PAIRS[0][1], PAIRS[1][1]]}
    answer = client.post(path, json=body).json()
    assert answer["object"] == "list" and answer["model"] == "tiny" and answer["id"].startswith("score-")
    assert [(each["index"], each["object"]) for each in answer["data"]] == [(0, "score"), (1, "score")]
    close([each["score"] for each in answer["data"]], torch.stack([expected(theirs, *pair) for pair in PAIRS[:2]]))
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 10
    assert client.post(path, json=body | {"text_1": ["a", "b", "c"]}).status_code == 400


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_rerank_route(served, path):
    theirs, client = served
    documents = ["a dog", {"text": "the cat sat on the mat"}, "blue tree"]
    texts = [each if isinstance(each, str) else each["text"] for each in documents]
    answer = client.post(path, json={"query": "where is the cat", "documents": documents, "top_n": 2}).json()
    wanted = torch.stack([expected(theirs, "where is the cat", text) for text in texts]).sort(descending=True)
    assert [each["index"] for each in answer["results"]] == wanted.indices[:2].tolist()
    close([each["relevance_score"] for each in answer["results"]], wanted.values[:2])
    assert [each["document"]["text"] for each in answer["results"]] == [texts[i] for i in wanted.indices[:2]]
    bare = client.post(path, json={"query": "a", "documents": ["b"], "return_documents": False}).json()
    assert "document" not in bare["results"][0]


def test_long_pairs_are_refused_or_truncated(served):
    theirs, client = served
    body = {"text_1": "where is the cat", "text_2": "cat " * 90}
    refused = client.post("/v1/score", json=body)
    assert refused.status_code == 400 and "truncate_prompt_tokens" in refused.json()["error"]["message"]
    answer = client.post("/v1/score", json=body | {"truncate_prompt_tokens": 20}).json()
    if hasattr(theirs, "classifier"):
        made = TOKENS("where is the cat", "cat " * 90, return_tensors="pt", truncation=True, max_length=20)
        with torch.inference_mode():
            close([answer["data"][0]["score"]], theirs(**made).logits[0].sigmoid())
        assert answer["usage"]["prompt_tokens"] == 20
    assert client.post("/v1/score", json=body | {"truncate_prompt_tokens": -1}).status_code == 200


def test_embeddings_route(served):
    theirs, client = served
    answer = client.post("/v1/embeddings", json={"input": TEXTS[:2], "pooling": "cls", "normalize": True}).json()
    for text, found in zip(TEXTS, answer["data"], strict=False):
        close(found["embedding"], unit(states(theirs, text)[0]))
    body = {"input": TEXTS[0], "truncate_prompt_tokens": 5, "normalize": True}
    cut = client.post("/v1/embeddings", json=body).json()
    assert cut["usage"]["prompt_tokens"] == 5
    made = TOKENS(TEXTS[0], return_tensors="pt", truncation=True, max_length=5)
    with torch.inference_mode():
        pooled = theirs.base_model(**made).last_hidden_state[0].mean(0)
    close(cut["data"][0]["embedding"], unit(pooled))


def test_classify_route(served):
    theirs, client = served
    response = client.post("/classify", json={"input": TEXTS[:2]})
    if not hasattr(theirs, "classifier"):
        assert response.status_code == 400 and "classification head" in response.json()["error"]["message"]
        return
    answer = response.json()
    assert answer["id"].startswith("classify-") and [each["num_classes"] for each in answer["data"]] == [1, 1]
    close([each["probs"][0] for each in answer["data"]], torch.cat([logits(theirs, t).sigmoid() for t in TEXTS[:2]]))
    assert answer["data"][0]["label"] == "LABEL_0"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "the cat"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "the cat"}]}),
        ("/v1/responses", {"input": "the cat"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "the cat"}], "max_tokens": 4}),
        ("/api/generate", {"prompt": "the cat", "stream": False}),
    ],
)
def test_generating_routes_refuse_an_encoder(served, path, body):
    _, client = served
    response = client.post(path, json={"model": "tiny", **body})
    assert response.status_code == 400 and "is an encoder" in response.text
