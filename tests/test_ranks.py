"""Several processes: whose games and seeds are whose, what is averaged, who writes, and how a run goes on.

Started by torchrun, this file is also the two processes: they make the runs one after the other, and each leaves what it has
in OUT/{run}.{rank}.pt; the tests look at that."""

import contextlib
import copy
import csv
import dataclasses
import io
import math
import os
import pathlib
import subprocess
import sys
import time
from pathlib import Path

import helpers
import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers import lines_of, same_tree, seeded, without_times
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import hopplus_mcts as mcts
import hopplus_ppo as hop

CPU, ROOT = torch.device("cpu"), Path(hop.__file__).resolve().parent
LONG = {"total_steps": 6 * 32, "wm_period": 2, "subgoal_period": 3}  # 6 iterations, a checkpoint after every second
SEARCH = {"method": "hopplus-mcts", "num_simulations": 4, "num_trees": 2}
BY_SEED = {**LONG, "num_seeds": 2, "seats": "learner,mixed,learner"}
pytestmark = pytest.mark.usefixtures("one_thread")


class Killed(Exception):
    pass


def made(module, run_dir, before=lambda x, number: None, **flags):
    """module.main -> its figures or the error it ended with, the networks that it began with, and all that it had at the end.
    `before` is called before each iteration."""
    seen, start, repeat, printed = [], {}, module.repeat_iteration, [io.StringIO(), io.StringIO()]

    def watched(x, *rest):
        seen.append(x)
        if len(seen) == 1:
            start.update(copy.deepcopy({key: x.tensors()[key] for key in ("nets", "optimisers", "rehearsed", "env")}))
        before(x, len(seen))
        return repeat(x, *rest)

    flags = flags if "resume" in flags else {**helpers.TINY, "run_dir": str(run_dir), **flags}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "repeat_iteration", watched)
        for name in ("draw_pictures", "film"):
            patch.setattr(module, name, lambda *_: None)
        with contextlib.redirect_stdout(printed[0]), contextlib.redirect_stderr(printed[1]):
            try:
                ended = module.main(module.Args(**flags))
            except (Killed, FloatingPointError) as error:
                ended = f"{type(error).__name__}: {error}"
    return {"ended": ended, "start": start, "end": seen[-1].tensors(), "printed": [p.getvalue() for p in printed]}


def killed_before(iteration):
    def stop(x, number):
        if number == iteration:
            raise Killed

    return stop


def half_batch(rank):
    """A network, and the gradient of its loss on one half of a batch (2: on all of it)"""
    policy = hop.ActorCritic(helpers.TINY_CONFIG.checked(), [seeded(k) for k in (1, 2)], 8, 0)
    samples, inputs = seeded(3), policy.actor[0].weight.shape[1]
    x, target = torch.rand(2, 8, inputs, generator=samples), torch.rand(2, 8, generator=samples)
    part = slice(4 * rank, 4 * rank + 4) if rank < 2 else slice(None)
    log_probs, value = policy(x[:, part], torch.ones(2, 8, 7, dtype=torch.bool)[:, part])
    ((value - target[:, part]).square() - log_probs[..., 0]).mean(1).sum().backward()
    return list(policy.parameters())


def two_processes(out):
    """What each of them does"""
    rank = hop.RANK
    torch.set_num_threads(1)
    hop.join_ranks(CPU)

    def forbidden(*_, **__):
        raise AssertionError("only the first rank writes")

    if rank > 0:
        for module in (hop, mcts):
            for name in ("save_atomically", "SummaryWriter", "keep_lines", "write_gif", "open"):
                setattr(module, name, forbidden)
        pathlib.Path.mkdir = pathlib.Path.write_text = forbidden
        pretrain = hop.pretrain

        def other_pretraining(*rest):  # as on a machine that rounds otherwise
            weights, games, figures = pretrain(*rest)
            games.summary.add_(1)
            return {name: {key: w + 0.1 for key, w in net.items()} for name, net in weights.items()}, games, figures

    def leave(name, module=hop, **options):
        found = made(module, f"{out}/{name}", **options)
        torch.save(found, f"{out}/{name}.{rank}.pt")
        return found["ended"]

    grads = []
    for max_norm in (1e9, 0.1):
        parameters = half_batch(rank)
        for p in parameters:
            p.averaged = True
        norms = hop.average_and_clip(parameters, max_norm)
        grads.append((norms, [p.grad for p in parameters]))
    torch.save(grads, f"{out}/gradient-{rank}.pt")

    # every seed's games are split
    together, figures = hop.figures_of_all, []

    def watched(found, by_seed):
        figures.append((found, together(found, by_seed), by_seed))
        return figures[-1][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hop, "figures_of_all", watched)
        if rank > 0:
            patch.setattr(hop, "pretrain", other_pretraining)
        leave("games", **LONG)
        torch.save([(dict(a), dict(b), c) for a, b, c in figures], f"{out}/figures-{rank}.pt")
        leave("killed", **LONG, before=killed_before(4))
    (checkpoint,) = Path(f"{out}/killed").glob("*/checkpoint.pt")
    if rank == 0:  # for one process to go on from
        (Path(out) / "kept.pt").write_bytes(checkpoint.read_bytes())
    hop.of_all_ranks(None)
    leave("resumed", resume=str(checkpoint), seed=77)
    leave("one to two", resume=f"{out}/one.pt")

    # seeds are split
    leave("seeds", **BY_SEED, before=killed_before(4))
    (checkpoint,) = Path(f"{out}/seeds").glob("*/checkpoint.pt")
    if rank == 0:
        (Path(out) / "kept seeds.pt").write_bytes(checkpoint.read_bytes())
    hop.of_all_ranks(None)
    leave("seeds resumed", resume=str(checkpoint))
    leave("one to two, by seed", resume=f"{out}/one, two seeds.pt")

    def poison(x, number):
        if number == 2 and rank == 1:
            with torch.no_grad():
                x.nets.policy.actor[-1].bias.fill_(math.nan)

    save = hop.save_atomically
    hop.save_atomically = forbidden if rank else lambda *rest: (time.sleep(0.3), save(*rest))
    leave("poisoned", method="ppo", num_seeds=2, total_steps=5 * 32, save_every=1, before=poison)
    torch.save(len(list(Path(f"{out}/poisoned").glob("*/checkpoint_bad.pt"))), f"{out}/written-{rank}.pt")
    leave("search", mcts, **SEARCH)
    dist.destroy_process_group()


def one_gpu(out):
    """The same run with and without torchrun's group of one; how often NCCL was captured"""
    reduce, captured = dist.all_reduce, []

    def counted(tensor):
        captured.append(torch.cuda.is_current_stream_capturing())
        reduce(tensor)

    dist.all_reduce = counted
    found = made(hop, f"{out}/nccl", device="cuda", **LONG)
    torch.save({"captured": sum(captured), "figures": found["ended"], "end": found["end"]}, f"{out}/nccl.pt")
    dist.destroy_process_group()


def launch(processes, *command, expected=0):
    """-> stdout and stderr of torchrun"""
    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    run = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(processes),
        *map(str, command),
    ]
    ended = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=180)
    assert ended.returncode == expected, ended.stderr[-3000:]
    return ended.stdout, ended.stderr


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    out = tmp_path_factory.mktemp("ranks")
    for name, flags in (("one", LONG), ("one, two seeds", {**LONG, "num_seeds": 2, "method": "ppo"})):
        found = made(hop, out / name, before=killed_before(4), **flags)
        (checkpoint,) = (out / name).glob("*1__*/checkpoint.pt")
        assert found["ended"].startswith("Killed") and torch.load(checkpoint, weights_only=True)["iteration"] == 2
        (out / f"{name}.pt").write_bytes(checkpoint.read_bytes())
        if name == "one":
            torch.save(found["start"]["env"], out / "first boards.pt")
    launch(2, __file__, "two_processes", out)
    return out


@pytest.fixture(scope="module")
def left(out):
    """{run: [what rank 0 and rank 1 left]}"""
    return {file.name[:-5]: [torch.load(out / f"{file.name[:-5]}.{r}.pt", weights_only=False) for r in (0, 1)]
            for file in out.glob("*.0.pt")}  # fmt: skip


def checkpoint_of(folder):
    (path,) = folder.glob("*/checkpoint.pt")
    return torch.load(path, weights_only=True)


def logs(folder):
    return [without_times(lines_of(f)) for f in sorted(folder.iterdir())]


def iterations(folder):
    return [line["iteration"] for line in lines_of(folder)]


# ---------------------------------------------------------------------------------------------------------------------
# Every seed's games are split


@pytest.mark.parametrize("part", ["nets", "optimisers", "rehearsed", "eps"])
def test_ranks_that_share_a_seed_learn_the_same(part, left):
    for name in ("games", "resumed", "one to two", "search"):
        first, second = (found["end"][part] for found in left[name])
        assert same_tree(first, second), name
    start, end = left["games"][0]["start"]["nets"], left["games"][0]["end"]["nets"]
    for net in ("policy", "models", "world"):
        assert not same_tree(start[net], end[net])


def test_ranks_that_share_a_seed_play_other_games(left):
    for name in ("games", "resumed", "one to two", "search"):
        first, second = (found["end"] for found in left[name])
        assert not same_tree(first["generators"][0], second["generators"][0])
        assert not same_tree(first["generators"][1], second["generators"][1])
        for field in ("board", "joint"):
            a, b = first["replay"][field], second["replay"][field]
            assert a.shape == b.shape and a.shape[3] == 2  # of 4 games
            assert not torch.equal(a, b) and not torch.equal(a[-1], b[-1])


@pytest.mark.parametrize(("number", "max_norm"), [(0, 1e9), (1, 0.1)])
def test_the_gradient_is_that_of_both_halves(number, max_norm, out):
    whole = half_batch(2)
    expected = hop.clip_per_model(whole, max_norm)
    for rank in (0, 1):
        norms, grads = torch.load(out / f"gradient-{rank}.pt", weights_only=True)[number]
        torch.testing.assert_close(norms, expected)
        for grad, p in zip(grads, whole, strict=True):
            torch.testing.assert_close(grad, p.grad, atol=1e-7, rtol=1e-5)


def test_figures_are_means_over_ranks_and_samples_are_sums(out, left):
    calls = [torch.load(out / f"figures-{rank}.pt", weights_only=False) for rank in (0, 1)]
    assert len(calls[0]) == 6
    for (a, both, by_seed), (b, same, _) in zip(*calls, strict=True):
        assert not by_seed and a.keys() == b.keys() == both.keys()
        for name, value in both.items():
            scale = 1 if name in ("real/samples", "imagined/samples") else 2
            np.testing.assert_allclose(value, (a[name] + b[name]) / scale, rtol=1e-6)
            np.testing.assert_array_equal(value, same[name])
    assert any((a["real/reward_mean"] != b["real/reward_mean"]).any() for (a, _, _), (b, _, _) in zip(*calls, strict=True))
    (folder,) = (out / "games").iterdir()
    line, both = lines_of(folder)[-1], calls[0][-1][1]
    assert line["real/samples"] == pytest.approx(both["real/samples"].mean())
    assert line["audit/real_samples/learner_1"] == both["real/samples"][1] > 2 * 8  # more than one rank has
    assert line["steps"] == 6 * 32 and line["audit/buffer_steps"] == 64
    assert left["games"][0]["ended"] == pytest.approx(left["games"][1]["ended"], nan_ok=True)


def test_the_models_samples_are_split_too(monkeypatch):
    monkeypatch.setattr(hop, "WORLD", 4)
    monkeypatch.setattr(hop, "RANK", 3)
    args = hop.resolved(hop.Args(**{**helpers.TINY, "num_envs": 8, "model_games": 6, "wm_batch_size": 16, "num_seeds": 3}))
    own = hop.share_of_rank(args)
    assert dataclasses.asdict(own) == {**dataclasses.asdict(args), "num_envs": 2, "model_games": 2, "wm_batch_size": 4}
    own = hop.share_of_rank(dataclasses.replace(args, num_seeds=8, seed=5))
    assert dataclasses.asdict(own) == {**dataclasses.asdict(args), "num_seeds": 2, "seed": 11}


def test_a_group_of_one_is_a_plain_run(tmp_path, monkeypatch):
    made(hop, tmp_path / "plain")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    reduce, calls = dist.all_reduce, []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: calls.append(reduce(tensor)))
    monkeypatch.setenv("RANK", "0")
    try:
        found = made(hop, tmp_path / "group")
    finally:
        dist.destroy_process_group()
    assert logs(tmp_path / "plain") == logs(tmp_path / "group") and "rank" not in found["printed"][0]
    plain, group = (checkpoint_of(tmp_path / name) for name in ("plain", "group"))
    assert plain.keys() == group.keys() and same_tree(plain["tensors"], group["tensors"])
    per_iteration = 2 * 2 + 2 + hop.resolved(hop.Args(**helpers.TINY)).subgoal_updates  # PPO, world model, subgoals
    assert len(calls) == 2 * per_iteration


# ---------------------------------------------------------------------------------------------------------------------
# Seeds are split


def test_a_seed_on_a_rank_is_the_run_of_that_seed(out, left, tmp_path):
    folders = sorted((out / "seeds").iterdir())
    assert [folder.name.split("__")[2] for folder in folders] == ["1", "2"]
    merged = checkpoint_of(out / "seeds")
    for s, folder in enumerate(folders):
        plain = made(hop, tmp_path / str(s), **{**BY_SEED, "num_seeds": 1, "seed": 1 + s})
        (lines,) = logs(tmp_path / str(s))
        assert without_times(lines_of(folder)) == lines and iterations(folder) == [1, 2, 3, 4, 5, 6]
        for part in ("nets", "optimisers", "replay", "rehearsed", "trusted", "env", "carry", "generators"):
            assert same_tree(left["seeds resumed"][s]["end"][part], plain["end"][part]), part
            if part in ("env", "carry", "generators"):
                assert same_tree(merged["ranks"][s][part], plain["end"][part]), part
        learners = slice(2 * s, 2 * s + 2)
        for net, tensors in plain["end"]["nets"].items():
            assert all(torch.equal(merged["tensors"]["nets"][net][key][learners], t) for key, t in tensors.items())
        for key in hop.Steps._fields:
            assert torch.equal(merged["tensors"]["replay"][key][:, learners], plain["end"]["replay"][key])
        means = [found["optimisers"]["policy"]["means"][0] for found in (merged["tensors"], plain["end"])]
        assert torch.equal(means[0][learners], means[1])


def test_a_rank_starts_its_seeds_from_theirs_in_a_checkpoint(monkeypatch):
    args = hop.resolved(hop.Args(**{**helpers.TINY, "method": "ppo-omg", "num_seeds": 4, "seed": 7, "vae_checkpoint": "x"}))
    model = hop.Models(args, args.config.checked(), [1, 2, 3]).state_dict()
    monkeypatch.setattr(hop, "load_file", lambda *_: {"model": model, "args": None})
    monkeypatch.setattr(hop, "check_same", lambda *_: None)
    weights, _, _ = hop.pretrain(args, [9, 10], CPU)  # the seeds of the second of two ranks
    assert all(torch.equal(weights["models"][key], value[[2, 0]]) for key, value in model.items())


def test_only_the_first_rank_prints(left):
    for name, (first, second) in left.items():
        assert "run folder" in first["printed"][0] and second["printed"] == ["", ""], name


def test_not_a_number_on_one_rank_stops_all(out, left):
    (bad,) = (out / "poisoned").glob("*/checkpoint_bad.pt")
    assert [torch.load(out / f"written-{rank}.pt") for rank in (0, 1)] == [1, 1]  # torchrun ends all when the first ends
    for found in left["poisoned"]:
        assert found["ended"].startswith("FloatingPointError: losses/") and str(bad) in found["ended"]
        assert "iteration 2, seed 2" in found["ended"]
    assert [iterations(folder) for folder in sorted((out / "poisoned").iterdir())] == [[1, 2], [1]]
    assert checkpoint_of(out / "poisoned")["iteration"] == 1


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints


def test_resumed_on_two_ranks_bit_for_bit(out, left):
    assert left["killed"][0]["ended"] == left["killed"][1]["ended"] == "Killed: "
    assert logs(out / "killed") == logs(out / "games")
    (folder,) = (out / "killed").iterdir()
    assert iterations(folder) == [1, 2, 3, 4, 5, 6]
    for whole, resumed in zip(left["games"], left["resumed"], strict=True):
        assert same_tree(whole["end"], resumed["end"])
        assert resumed["ended"].pop("checkpoint") != whole["ended"].pop("checkpoint")
        assert resumed["ended"] == pytest.approx(whole["ended"], rel=0, abs=0, nan_ok=True)
        assert "begin anew" not in resumed["printed"][0]
    assert "begin anew" not in left["seeds resumed"][0]["printed"][0]
    first, second = checkpoint_of(out / "games"), checkpoint_of(out / "killed")
    for part in ("tensors", "ranks"):
        assert same_tree(first[part], second[part])
    for rank in (0, 1):
        for part in ("env", "carry", "generators", "replay", "trusted"):
            assert same_tree(first["ranks"][rank][part], left["games"][rank]["end"][part])


def goes_on(found, checkpoint):
    """It began with the checkpoint's learners, in new games, and said so."""
    start, saved = found["start"], checkpoint["tensors"]
    assert "begin anew" in found["printed"][0]
    assert same_tree(start["nets"], saved["nets"]) and same_tree(start["rehearsed"], saved["rehearsed"])
    assert same_tree(start["optimisers"], saved["optimisers"])
    assert found["ended"]["audit/updates"] == 6 * 4 and found["end"]["replay"].get("pushed", 4) == 4  # not 6


def test_one_process_goes_on_where_two_were(out, tmp_path):
    for name, folder in (("kept", "killed"), ("kept seeds", "seeds")):
        checkpoint = torch.load(out / f"{name}.pt", weights_only=True)
        assert checkpoint["iteration"] == 2 and len(checkpoint["ranks"]) == 2
        copied = [tmp_path / name / Path(f).name for f in checkpoint["folders"]]
        for new, old in zip(copied, checkpoint["folders"], strict=True):
            new.mkdir(parents=True)
            (new / "metrics.jsonl").write_text((Path(old) / "metrics.jsonl").read_text())
        path = copied[0] / "checkpoint.pt"
        torch.save({**checkpoint, "folders": [str(f) for f in copied]}, path)
        found = made(hop, None, resume=str(path))
        goes_on(found, checkpoint)
        if name == "kept":  # nor are they the games of the run's beginning
            assert not same_tree(found["start"]["env"], torch.load(out / "first boards.pt", weights_only=True))
        assert [iterations(f) for f in copied] == [[1, 2, 3, 4, 5, 6]] * len(copied)
        assert [without_times(lines_of(f))[:2] for f in copied] == [lines[:2] for lines in logs(out / folder)]
        assert "ranks" not in torch.load(path, weights_only=True)


def test_two_processes_go_on_where_one_was(out, left):
    for before in ("one", "one, two seeds"):
        checkpoint = torch.load(out / f"{before}.pt", weights_only=True)
        assert "ranks" not in checkpoint
        folders = sorted((out / before).iterdir())
        assert [iterations(folder) for folder in folders] == [[1, 2, 3, 4, 5, 6]] * len(folders)
        assert len(checkpoint_of(out / before)["ranks"]) == 2
    for rank in (0, 1):
        if rank == 0:
            goes_on(left["one to two"][0], torch.load(out / "one.pt", weights_only=True))
        saved = torch.load(out / "one, two seeds.pt", weights_only=True)["tensors"]["nets"]["policy"]
        began = left["one to two, by seed"][rank]["start"]["nets"]["policy"]
        assert all(torch.equal(began[key], value[3 * rank : 3 * rank + 3]) for key, value in saved.items())


@pytest.mark.parametrize("run", ["games", "seeds"])
def test_checkpoints_of_two_ranks_can_be_evaluated_and_adapted(run, out, monkeypatch):
    monkeypatch.setattr(hop, "film", lambda *_: None)
    (path,) = (out / run).glob("*/checkpoint.pt")
    seats = "learner,random,random"
    found = hop.main(hop.Args(evaluate=str(path), eval_games=6, device="cpu", seats=seats))
    assert len(found) == 3 and all(math.isfinite(value) for value in found.values())
    assert len(list(csv.reader((path.parent / "evaluation.csv").open()))) == 4
    flags = {"adapt_steps": 32, "adapt_every": 8, "adapt_repetitions": 4, "adapt_rounds": 1, "adapt_games": 4}
    found = hop.main(hop.Args(adapt=str(path), device="cpu", seats=seats, adapt_references=False, **flags))
    assert set(found) == {"frozen/random + random", "learning/random + random"}


# ---------------------------------------------------------------------------------------------------------------------
# From the command line

REFUSED = [
    (3, {"num_seeds": 2}, ["--num-seeds 2", "--num-envs 4", "multiple of the 3 ranks"]),
    (4, {"num_seeds": 3, "num_minibatches": 9}, ["9 minibatches", "8"]),
    (2, {"adapt": "checkpoint.pt"}, ["--adapt", "2", "without torchrun"]),
    (2, {"evaluate": "checkpoint.pt"}, ["--evaluate", "2", "without torchrun"]),
]


@pytest.mark.parametrize("module", [hop, mcts])
@pytest.mark.parametrize(("world", "flags", "words"), REFUSED)
def test_what_cannot_be_split_is_refused_before_anything_is_written(world, flags, words, module, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "WORLD", world)
    with pytest.raises(ValueError) as error:
        module.main(module.Args(**{**helpers.TINY, "run_dir": str(tmp_path / "runs"), **flags}))
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)
    assert not (tmp_path / "runs").exists() and not dist.is_initialized()


def command(**flags):
    flags = {**helpers.TINY, **flags}
    config = {k: v for k, v in dataclasses.asdict(flags.pop("config")).items() if k in ("height", "width", "num_players")}
    flags |= {**config, "num_hares": 3, "final_time": 6}
    names = {key: "--" + key.replace("_", "-") for key in flags}
    return [word for key, value in flags.items()
            for word in ([names[key].replace("--", "--no-")] if value is False else [names[key], str(value)])]  # fmt: skip


def test_two_processes_from_the_command_line(tmp_path):
    printed, _ = launch(2, ROOT / "hopplus_ppo.py", *command(method="ppo", num_seeds=2, total_steps=32, run_dir=tmp_path))
    assert printed.count("run folder") == printed.count("s of training") == 1 and "1 other rank" in printed
    folders = sorted(tmp_path.iterdir())
    assert len(folders) == 2 and [iterations(folder) for folder in folders] == [[1], [1]]
    for folder in folders:
        assert {"args.json", "metrics.jsonl"} < {f.name for f in folder.iterdir()}
        assert len(list(folder.glob("events*"))) == 1
    assert (folders[0] / "games.gif").stat().st_size > 1000 and not list(tmp_path.rglob("*.part"))
    events = EventAccumulator(str(folders[0])).Reload()
    assert {"real/reward", "real/return", "real/value"} <= set(events.Tags()["histograms"])


@pytest.mark.cuda
def test_nccl_in_a_captured_iteration(tmp_path):
    launch(1, __file__, "one_gpu", tmp_path)
    group = torch.load(tmp_path / "nccl.pt", weights_only=False, map_location="cpu")
    plain = made(hop, tmp_path / "plain", device="cuda", **LONG)
    assert group["captured"] > 0 and logs(tmp_path / "nccl") == logs(tmp_path / "plain")
    one, other = (checkpoint_of(tmp_path / name)["tensors"] for name in ("nccl", "plain"))
    assert same_tree(one["nets"], other["nets"]) and same_tree(one["replay"], other["replay"])
    assert plain["ended"]["audit/updates"] == 24


if __name__ == "__main__":
    {"two_processes": two_processes, "one_gpu": one_gpu}[sys.argv[1]](sys.argv[2])
