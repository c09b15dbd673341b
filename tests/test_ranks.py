"""Two processes: whose games are whose, what is averaged, who writes, and how a run goes on.

Started by torchrun, this file is also the two processes; each leaves what it has in OUT/*.{rank}.pt."""

import copy
import os
import pathlib
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import hopplus_ppo as hop

import numpy as np
import pytest
import torch
from helpers import TINY_CONFIG, TINY_FLAGS, lines_of, same_tree, without_times

CPU, ROOT = torch.device("cpu"), Path(hop.__file__).resolve().parent
FLAGS = {**TINY_FLAGS, "total_timesteps": 4 * 32, "save_seconds": 0.0, "num_seeds": 2}


class Killed(Exception):
    pass


def gradient(part, max_norm):
    """One step on a part of a batch of 8 -> norms, weights"""
    args = hop.make_args("ppo", "cpu", **TINY_FLAGS)
    policy = hop.Stacked(lambda: hop.ActorCritic(TINY_CONFIG, args), [1, 2], CPU)
    optimizer = hop.Adam(policy.parameters(), 0.1)
    torch.manual_seed(3)
    x, target = 12 * torch.rand(2, 8, sum(policy.network.sizes))[:, part], torch.rand(2, 8)[:, part]
    log_probs, value = policy(x, torch.ones(*x.shape[:2], 7, dtype=torch.bool))
    loss = ((value - target).square() - log_probs[..., 0]).mean(1)
    return hop.optimizer_step(optimizer, loss, max_norm), policy.state_dict()


def run(flags, kill_before=None):
    """hop.main -> what it returned or refused, the state at the first and after the last iteration, the metrics read"""
    found = {"start": None, "metrics": []}
    train_iteration, read, calls = hop.train_iteration, hop.MetricSums.read, []

    def watched(state):
        calls.append(state)
        if len(calls) == 1:
            found["start"] = copy.deepcopy(state.state_dict())
        if len(calls) == kill_before:
            raise Killed
        samples = train_iteration(state)
        found["end"] = copy.deepcopy(state.state_dict())
        return samples

    def watched_read(sums):
        own = {name: total.numpy() / float(sums.count) for name, total in sums.sums.items()}
        found["metrics"].append((own, read(sums)))
        return found["metrics"][-1][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hop, "train_iteration", watched)
        patch.setattr(hop.MetricSums, "read", watched_read)
        try:
            found["final"] = hop.main(hop.make_args("hopplus", "cpu", **flags))
        except (Killed, ValueError) as error:
            found["final"] = f"{type(error).__name__}: {error}"
    return found


def two_processes(out):
    torch.set_num_threads(1)
    rank, world, _ = hop.init_ranks(CPU)
    assert world == 2

    def forbidden(*_, **__):
        raise AssertionError("only the first rank writes")

    if rank > 0:
        for name in ("Run", "keep_rows"):
            setattr(hop.game, name, forbidden)
        pathlib.Path.mkdir = pathlib.Path.write_text = forbidden
    found = {"gradients": [gradient(slice(4 * rank, 4 * rank + 4), max_norm) for max_norm in (1e9, 0.1)]}
    found["whole"] = run({**FLAGS, "run_dir": f"{out}/whole"})
    found["killed"] = run({**FLAGS, "run_dir": f"{out}/killed"}, kill_before=4)
    (checkpoint,) = Path(f"{out}/killed").glob("*/checkpoint.pt")
    if rank == 0:  # for one process to try
        shutil.copy(checkpoint, f"{out}/kept.pt")
    hop.gather_ranks(None)
    found["resumed"] = run({"resume": str(checkpoint)})
    found["odd"] = run({**FLAGS, "num_envs": 3, "run_dir": f"{out}/odd"})["final"]
    torch.save(found, f"{out}/found.{rank}.pt")
    hop.gather_ranks(None)
    hop.dist.destroy_process_group()
    os._exit(0)  # how Python takes down the threads of torch is not what is tested here


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    out = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("", 0))
        port = str(free.getsockname()[1])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port]
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    environment = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    done = subprocess.run([*torchrun, __file__, out], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return out, [torch.load(out / f"found.{rank}.pt", weights_only=False) for rank in range(2)]


def test_gradients_are_averaged_and_then_clipped(ranks):
    for number, max_norm in enumerate((1e9, 0.1)):
        norms, weights = gradient(slice(None), max_norm)
        for found in ranks[1]:
            ours, our_weights = found["gradients"][number]
            torch.testing.assert_close(ours, norms)
            for name, x in weights.items():
                torch.testing.assert_close(our_weights[name], x, atol=1e-4, rtol=1e-4)
    assert (norms > 0.2).all()


def test_ranks_hold_the_same_networks_and_other_games(ranks):
    first, second = (found["whole"] for found in ranks[1])
    for moment in ("start", "end"):
        assert same_tree(first[moment]["networks"], second[moment]["networks"]), moment
        assert same_tree(first[moment]["optimizers"], second[moment]["optimizers"]), moment
        for part in ("games", "watched", "cpu_random"):
            assert not same_tree(first[moment][part], second[moment][part]), part
        for part in ("env", "replay"):
            assert not same_tree(first[moment]["watched"][part], second[moment]["watched"][part]), part
        assert not same_tree(first[moment]["games"]["env"], second[moment]["games"]["env"])
    assert not same_tree(first["start"]["networks"]["moa"], first["end"]["networks"]["moa"])
    replays = [found["end"]["games"]["replay"]["data"] for found in (first, second)]
    assert replays[0]["done"].shape == (2, 6, 8, 2), "of 4 games per seed each rank plays 2"
    assert not torch.equal(replays[0]["board"], replays[1]["board"])


def test_metrics_are_means_over_the_ranks(ranks):
    first, second = (found["whole"]["metrics"] for found in ranks[1])
    assert len(first) == len(second) == 4
    for (own, mean), (other, other_mean) in zip(first, second, strict=True):
        assert own.keys() == other.keys() == mean.keys()
        for name, x in mean.items():
            np.testing.assert_allclose(x, (own[name] + other[name]) / 2, rtol=1e-5, err_msg=name)
            assert x.tolist() == other_mean[name].tolist()
    assert first[0][0]["real/value_mean"].tolist() != second[0][0]["real/value_mean"].tolist()


def test_one_set_of_files(ranks):
    out, (first, second) = ranks
    folders = sorted((out / "whole").iterdir())
    assert len(folders) == 2 and first["whole"]["final"] == pytest.approx(second["whole"]["final"], nan_ok=True)
    assert [line["steps"] for line in lines_of(folders[1])] == [32, 64, 96, 128]
    saved = torch.load(first["whole"]["final"]["checkpoint"], weights_only=True)
    assert len(saved["states"]) == 2 and saved["args"]["num_envs"] == 4
    for state, found in zip(saved["states"], (first, second), strict=True):
        assert same_tree(state["games"], found["whole"]["end"]["games"])
        assert same_tree(state["watched"], found["whole"]["end"]["watched"])


def test_a_resumed_run_is_the_same_bit_for_bit(ranks):
    out, found = ranks
    for rank in range(2):
        assert found[rank]["killed"]["final"] == "Killed: "
        whole, resumed = found[rank]["whole"], found[rank]["resumed"]
        for part, value in whole["end"].items():
            assert same_tree(value, resumed["end"][part]), part
        for part, value in found[rank]["killed"]["end"].items():
            assert part in ("eps", "metrics") or same_tree(value, resumed["start"][part]), part
    lines = [without_times(lines_of(sorted((out / name).iterdir())[1])) for name in ("whole", "killed")]
    assert lines[0] == lines[1] and len(lines[0]) == 4


def test_what_cannot_be_split_is_refused(ranks):
    out, found = ranks
    for each in found:
        assert each["odd"] == "UserError: --num-envs 3 must be a multiple of the 2 ranks"
    assert not (out / "odd").exists()
    with pytest.raises(ValueError, match=r"goes on on 2 rank\(s\) on cpu only"):
        hop.main(hop.make_args("hopplus", "cpu", resume=str(out / "kept.pt")))


if __name__ == "__main__":
    two_processes(sys.argv[1])
