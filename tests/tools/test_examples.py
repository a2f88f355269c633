"""Every example runs, with small settings, and prints what it promises."""

import contextlib
import importlib
import os
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import multiprocessing

from tests import fresh

from ..models.test_distributed import PRELOADED, address_of, meeting_place

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="session")  # slow ones begin before the others
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _examples_are_importable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path) -> None:
    monkeypatch.setenv("WEFT_CACHE_DIR", str(cache))
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.chdir(tmp_path)


def load(name: str) -> ModuleType:
    return importlib.import_module(name)


def on_forked_ranks(work: Any, given: tuple[Any, ...], nprocs: int) -> None:
    """As torch's `spawn`, by the server of processes that has imported torch; what ranks print is printed here."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    multiprocessing.start_processes(  # type: ignore[no-untyped-call]
        _printing, (dict(os.environ), work, given), nprocs=nprocs, start_method="forkserver"
    )
    for rank in range(nprocs):
        print(Path(f"printed-{rank}").read_text())


def _printing(rank: int, environment: dict[str, str], work: Any, given: tuple[Any, ...]) -> None:
    os.environ.clear()  # a forked process has that of the server
    os.environ.update(environment)
    with open(f"printed-{rank}", "w") as file, contextlib.redirect_stdout(file):
        work(rank, *given)


def _as_of_torchrun(rank: int, ranks: int, port: int, name: str, arguments: list[str]) -> None:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
    os.environ.update({n: str(value) for n, value in numbers.items()}, **address_of(port))
    load(name).main(arguments)
    sys.stdout.flush()
    os._exit(0)  # as ranks.py ends


def test_every_example_is_tested_here() -> None:
    with_main = {p.stem for p in EXAMPLES.glob("*.py") if "def main(" in p.read_text()}
    assert with_main == {
        "quickstart", "custom_score", "differential", "dropout", "latent", "packed_documents", "ragged_batch", "sinks",
        "t5_bias", "transformers_train", "transformers_generate", "block_sparse",
        "demo", "server", "serve_fp8", "cross_attention", "long_context", "moba", "multi_token", "multihead", "nsa",
        "torchtitan_attention", "train", "transformer_xl",
    }  # fmt: skip


def test_differential_attention(capsys: pytest.CaptureFixture[str]) -> None:
    load("differential").main(length=64, heads=2, dim=16)
    output = capsys.readouterr().out
    error = re.search(r"largest error against float64 (\S+)", output)
    assert error is not None and float(error[1]) < (1e-4 if not torch.cuda.is_available() else 0.1)
    assert "gradient of lambda, by head" in output
    second = re.search(r"version 2: largest difference to float64 (\S+)", output)
    assert second is not None and float(second[1]) < (1e-4 if not torch.cuda.is_available() else 0.1)


def differences(output: str) -> list[float]:
    return [float(x) for x in re.findall(r"(?:largest error|largest difference)[a-z0-9 :]* (\d\S*)", output)]


NEAR = 1e-5 if not torch.cuda.is_available() else 0.1


def test_sparse_attentions_read_the_blocks_that_they_choose(capsys: pytest.CaptureFixture[str]) -> None:
    load("nsa").main(length=64, size=8, count=3, near=12, steps=12)
    output = capsys.readouterr().out
    losses = [float(x) for x in re.findall(r"mean square error (\S+)", output)]
    assert max(differences(output)) < NEAR and losses[-1] < 0.8 * losses[0]
    load("moba").main(length=50, size=8, count=3)
    output = capsys.readouterr().out
    assert max(differences(output)) < NEAR
    read = re.findall(r"^ +\d+  ([█·]{7})$", output, re.M)
    assert [row.count("█") for row in read] == [1, 2, 3, 3, 3, 3, 3]


def test_registers_learn_what_lies_ahead_and_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    load("multi_token").main(length=16, ahead=3, steps=30)
    output = capsys.readouterr().out
    losses = [[float(x) for x in found] for found in re.findall(r"next token (\S+)  3 ahead (\S+)", output)]
    assert all(last < 0.5 * first for first, last in zip(losses[0], losses[-1]))
    (difference,) = differences(output)
    assert difference < (1e-4 if not torch.cuda.is_available() else 0.1)


def test_transformer_xl_reads_its_memory(capsys: pytest.CaptureFixture[str]) -> None:
    load("transformer_xl").main(length=16, memory=16, steps=90)
    output = capsys.readouterr().out
    losses = [float(x) for x in re.findall(r"mean square error (\S+)", output)]
    assert max(differences(output)) < NEAR and losses[-1] < 0.8 * losses[0]
    assert all(float(x) > 0 for x in re.findall(r"(\d\.\d\d)[, ]", output.splitlines()[-1]))


def test_cross_attention_and_its_padding(capsys: pytest.CaptureFixture[str]) -> None:
    load("cross_attention").main()
    output = capsys.readouterr().out
    found = differences(output)
    assert len(found) == 3 and max(found) < NEAR
    assert "gradients of padding: 0.0" in output


def test_a_module_of_torch_is_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    load("multihead").main(length=24, width=32)
    output = capsys.readouterr().out
    found = differences(output)
    assert len(found) == 5 and max(found) < NEAR
    assert "need_weights=True: weights are never in memory" in output


def test_ragged_batch(capsys: pytest.CaptureFixture[str]) -> None:
    load("ragged_batch").main(lengths=(40, 3, 1, 30), heads=2, dim=16)
    output = capsys.readouterr().out
    assert "gradients stay in the sequence that the loss reads: True" in output
    assert "what lies behind a length reaches nothing: True" in output
    assert "three tokens decoded: [[4, 2, 1, 16]" in output


def test_block_sparse_learns_in_memory_of_the_length(capsys: pytest.CaptureFixture[str]) -> None:
    load("block_sparse").main(length=256, steps=20, sequences=4)
    output = capsys.readouterr().out
    assert "256 tokens in blocks of 64: " in output and "the loss fell: True" in output
    kept = [int(n) for n in re.findall(r"(\d+) at \d+", output.splitlines()[-1])]
    assert len(kept) == 2 and kept[1] < 1.1 * kept[0]


def test_quickstart(capsys: pytest.CaptureFixture[str]) -> None:
    load("quickstart").main(length=64)
    output = capsys.readouterr().out
    error = re.search(r"largest error against float64 (\S+)", output)
    assert error is not None and float(error[1]) < (1e-4 if not torch.cuda.is_available() else 0.1)
    assert "gradient of the slopes" in output


def test_custom_score_learns(capsys: pytest.CaptureFixture[str]) -> None:
    load("custom_score").main(length=32, steps=40)
    losses = [float(x) for x in re.findall(r"mean square error (\S+)", capsys.readouterr().out)]
    assert losses[-1] < 0.5 * losses[0]


def test_latent_forms_agree(capsys: pytest.CaptureFixture[str]) -> None:
    load("latent").main(rank=16, rope=8, nope=16, heads=2, cached=32)
    output = capsys.readouterr().out
    by_hand, *kernels = (float(x) for x in re.findall(r"(?:largest difference|error) (\d\S*?)[,\s]", output))
    assert by_hand < 1e-10
    assert len(kernels) == 2 and max(kernels) < 1e-4


def test_packed_documents_stay_apart(capsys: pytest.CaptureFixture[str]) -> None:
    load("packed_documents").main(length=256, heads=2, dim=16)
    output = capsys.readouterr().out
    assert "reach the document that the loss reads, and nothing else: True" in output
    assert "216 empty, 16 edge" in output
    difference = re.search(r"packed against alone: largest difference (\S+)", output)
    assert difference is not None and float(difference[1]) < (1e-5 if not torch.cuda.is_available() else 0.1)


def test_dropout_is_of_training(capsys: pytest.CaptureFixture[str]) -> None:
    load("dropout").main(steps=2, length=9)
    assert (
        len(re.findall(r"^dropout 0\.[03]: loss \d+\.\d\d on what it learned, \d", capsys.readouterr().out, re.M)) == 2
    )


def test_sinks_are_learned(capsys: pytest.CaptureFixture[str]) -> None:
    load("sinks").main(length=48, size=16, steps=30)
    output = capsys.readouterr().out
    error = re.search(r"by hand (\S+)", output)
    assert error is not None and float(error[1]) < (1e-5 if not torch.cuda.is_available() else 0.1)
    losses = [float(x) for x in re.findall(r"mean square error (\S+)", output)]
    assert losses[-1] < 0.1 * losses[0]


def test_a_t5_bias_learns_a_distance(capsys: pytest.CaptureFixture[str]) -> None:
    load("t5_bias").main(length=40, steps=40, back=2)
    output = capsys.readouterr().out
    error = re.search(r"against float64 (\S+)", output)
    assert error is not None and float(error[1]) < (1e-5 if not torch.cuda.is_available() else 0.1)
    losses = [float(x) for x in re.findall(r"mean square error (\S+)", output)]
    assert losses[-1] < 0.2 * losses[0]
    assert "learned to read: [2, 2], of distance 2" in output


def test_a_model_of_transformers_trains_and_generates(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")  # the extra weft-attention[transformers]
    load("transformers_train").main(steps=12)
    output = capsys.readouterr().out
    difference = re.search(r"losses of eager, 3 steps: (\S+)", output)
    assert difference is not None and float(difference[1]) < 1e-4
    losses = [float(x) for x in re.findall(r"loss (\d\S+)", output)]
    assert losses[-1] < losses[0]
    assert re.search(r"mask .*\(t\d\[batch, q_pos\] == t\d\[batch, kv_pos\]\)", output), "sequences are recognised"
    load("transformers_generate").main(steps=5, count=8)
    output = capsys.readouterr().out
    assert re.search(r"^if the value of the expression \|.{8}$", output, re.M)
    assert len(re.findall(r"(?:static cache|by itself|under eager): +True$", output, re.M)) == 3


@pytest.mark.parametrize("more", [[], ["--mixed"]], ids=str)
def test_the_server_answers_as_the_model_does_alone(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    load("server").main(["--steps=2", "--requests=5", "--new=40", "--blocks=14", *more])
    output = " ".join(capsys.readouterr().out.split())
    assert "answers that the model gives alone, without a cache, too: 5 of 5" in output
    swapped = re.search(r"(\d+) more shared; .* (\d+) swapped out", output)
    assert swapped is not None and int(swapped[1]) >= 4 * 64 and int(swapped[2]) > 0


@pytest.mark.slow(14)
def test_the_server_answers_on_two_ranks_as_on_one(capsys: pytest.CaptureFixture[str]) -> None:
    """With a cache that both hold: by tokens, where torchrun starts them, and by heads."""
    arguments = ["--steps=2", "--requests=4", "--new=24", "--blocks=12"]
    load("server").main(arguments)

    def digest(output: str) -> str:
        assert "too: 4 of 4" in " ".join(output.split())
        return re.findall(r"digest of all answers: (\w+)", output)[0]

    alone = digest(capsys.readouterr().out)
    torchrun = "import sys\nfrom torch.distributed.run import main\nmain(sys.argv[1:])"
    given = ["--standalone", "--nproc-per-node=2", str(EXAMPLES / "server.py"), *arguments, "--divide=sequence"]
    found = fresh.run(torchrun, *given, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)
    place = meeting_place()
    on_forked_ranks(_as_of_torchrun, (2, place.port, "server", [*arguments, "--divide=heads"]), 2)
    for output in (found.stdout, capsys.readouterr().out):
        assert digest(output) == alone and "ShardedPagedCache" in output


def test_the_server_answers_from_a_cache_of_fp8(capsys: pytest.CaptureFixture[str]) -> None:
    load("server").main(["--steps=2", "--requests=2", "--new=8", "--cache-dtype=float8_e4m3fn"])
    output = " ".join(capsys.readouterr().out.split())
    assert re.search(r"without a cache, too: \d of 2", output)
    assert "40 blocks of 16 used" in output and "0.4 MiB" in output  # a quarter of float32's 1.2, and descales


def test_a_long_context_over_two_processes(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load("ranks"), "spawn", on_forked_ranks)
    load("long_context").main(["--length=256", "--near=32", "--heads=2", "--kv-heads=1", "--head-dim=16"])
    output = capfd.readouterr().out
    assert re.search(r"256 tokens over 2 ranks: forward and backward [\d.,]+ ms", output), output
    assert "streaming over 2 ranks" in output and "stands on  the values of first, window" in output


@pytest.mark.slow(17)
def test_training_resumes_bit_for_bit_and_goes_on_on_another_mesh(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP and context parallel on two ranks; the last run compiles what lies around attention."""
    monkeypatch.setattr(load("ranks"), "spawn", on_forked_ranks)

    def losses(ranks: int, steps: int, at: int, *more: str) -> list[float]:
        given = [f"--{n}={v}" for n, v in settings.items()]
        load("train").main([*given, f"--ranks={ranks}", f"--cp={ranks}", f"--steps={steps}", *more])
        output = capfd.readouterr().out
        begun = f"resumed at step {at}" if at else "from the start"
        assert f"parameters, {ranks} ranks in groups of {ranks}: {begun}" in output, output
        return [float(x) for x in re.findall(r"^step \d+ +loss (\S+) +tokens/s [\d,]+ .*%", output, re.M)]

    settings = {"length": 64, "window": 16, "batch": 2, "every": 3, "rate": 0.02, "out": "kept"}
    straight = losses(2, 6, 0)
    assert straight[-1] < straight[0] - 0.5
    expected = state_of(Path("kept/step-00000006"))
    shutil.rmtree("kept/step-00000006")
    resumed = losses(2, 7, 3)
    assert resumed[:3] == straight[3:]
    found = state_of(Path("kept/step-00000006"))
    assert expected.keys() == found.keys() and len(expected) > 60
    assert [n for n, value in expected.items() if not torch.equal(value, found[n])] == []
    shutil.rmtree("kept/step-00000007")
    assert losses(1, 7, 6, "--compile") == pytest.approx(resumed[3:], abs=0.02)  # both compute in bf16


def test_torchtitans_debug_model_trains_over_two_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    """On two ranks as on one."""
    pytest.importorskip("torchtitan")
    losses = []
    for ranks, steps in ((2, 20), (1, 3)):
        load("torchtitan_attention").main([f"--ranks={ranks}", f"--steps={steps}", "--length=64", "--near=20"])
        losses.append([float(x) for x in re.findall(r"^step \d+ +loss (\S+)$", capfd.readouterr().out, re.M)])
    assert len(losses[0]) == 20 and losses[0][-1] < losses[0][0] - 2
    assert losses[1] == pytest.approx(losses[0][:3], abs=1e-3)


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    """All that a checkpoint holds, whole, by name."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(folder, "whole.pt")
    found: dict[str, torch.Tensor] = {}

    def flatten(name: str, part: object) -> None:
        if isinstance(part, dict):
            for n, inner in part.items():
                flatten(f"{name}.{n}", inner)
        elif isinstance(part, torch.Tensor):
            found[name] = part

    flatten("", torch.load("whole.pt", weights_only=False))
    return found


def test_caches_of_fp8_lose_little(capsys: pytest.CaptureFixture[str]) -> None:
    load("serve_fp8").main(["--steps=5", "--length=32"])
    output = " ".join(capsys.readouterr().out.split())
    rows = re.findall(r"(float32|e4m3, by \w+|e5m2, by \w+) │ (\d+) │ \S+ │ (\S+) │ (\S+)% │", output)
    assert [int(size) for _, size, *_ in rows] == [2048, 576, 512, 576]
    assert all(abs(float(lost)) < 0.01 and float(same) > 90 for _, _, lost, same in rows)


def test_demo_trains_the_same_model_on_both(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    settings = {"steps": 3, "batch": 2, "length": 32, "window": 8, "sample": 5, "out": tmp_path / "out"}
    load("demo").main([f"--{name}={value}" for name, value in settings.items()])
    output = capsys.readouterr().out
    difference = re.search(r"largest difference of the losses at any step: (\S+)", output)
    assert difference is not None and float(difference[1]) < 0.05
    assert (tmp_path / "out" / "mask.png").read_bytes().startswith(b"\x89PNG")
    assert {p.name for p in (tmp_path / "out").iterdir()} >= {
        "kernel_forward.py",
        "kernel_backward.py",
        "plan_h100.txt",
    }


def test_cached_decoding_gives_the_same_logits() -> None:
    """One query a step against the cache (q_len != kv_len) is the same function as the whole text at once."""
    char_gpt = load("char_gpt")
    torch.manual_seed(0)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return char_gpt.capped_window(query, key, value, window=6)

    model = char_gpt.CharGPT(char_gpt.Config(vocabulary=11, width=32, layers=2, heads=4, kv_heads=2), attend)
    tokens = torch.randint(11, (2, 20))
    cache: list[tuple[torch.Tensor, torch.Tensor]] = []
    with torch.no_grad():
        pieces = [model(tokens[:, :12], cache), *(model(tokens[:, i : i + 1], cache) for i in range(12, 20))]
        torch.testing.assert_close(torch.cat(pieces, dim=1), model(tokens), atol=1e-4, rtol=1e-4)
