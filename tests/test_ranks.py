"""Two processes: whose games are whose, what is averaged, who writes, and how a run goes on.

Started as a script, this file becomes the two processes, as torchrun would start them; each leaves what it has in
OUT/*.{rank}.pt."""

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
from helpers import lines_of, refused, resume, same_tree, tiny_args, without_times
from test_runs import load

CPU, ROOT = torch.device("cpu"), Path(hop.__file__).resolve().parent
FLAGS = {"total_timesteps": 4 * 32, "save_seconds": 0.0, "num_seeds": 2, "subgoal_batch_size": 5, "wm_batch_size": 17}


def gradient(part, max_norm):
    """One step on a part of a batch of 8 -> norms, weights"""
    args = tiny_args("ppo")
    policy = hop.Stacked(hop.ActorCritic, args, [1, 2], CPU)
    optimizer = hop.Adam([policy], 0.1, max_norm=max_norm)
    torch.manual_seed(3)
    board, joint = torch.randint(12, (2, 8, 8)), torch.randint(7, (2, 8, 3))
    clock, target = torch.rand(2, 2, 8)
    board, joint, clock, target = (x[:, part] for x in (board, joint, clock, target))
    goals, legal = clock.new_zeros(*clock.shape, 0), torch.ones(*clock.shape, 7, dtype=torch.bool)
    log_probs, value = policy(board, clock, joint, goals, legal)
    loss = ((value - target).square() - log_probs[..., 0]).mean(1)
    return optimizer.step(loss), policy.state_dict()


def run(kill_before=None, **flags):
    """hop.main -> what it was refused for, the state at the first and after the last iteration, the metrics read"""
    found = {"start": None, "metrics": [], "refused": None}
    train_iteration, read, calls = hop.train_iteration, hop.read_metrics, []

    def watched(state):
        calls.append(state)
        if len(calls) == 1:
            found["batch_sizes"] = state.args.subgoal_batch_size, state.args.wm_batch_size
            found["start"] = copy.deepcopy(state.state_dict())
        if len(calls) == kill_before:
            raise ZeroDivisionError("killed")
        samples = train_iteration(state)
        found["end"] = copy.deepcopy(state.state_dict())
        return samples

    def watched_read(state):
        own = {name: x.numpy().copy() for name, x in state.sums.items()}
        found["metrics"].append((own, read(state)))
        return found["metrics"][-1][1]

    def refused(wrong, message):
        if wrong:
            raise LookupError(message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hop, "train_iteration", watched)
        patch.setattr(hop, "read_metrics", watched_read)
        patch.setattr(hop, "refuse", refused)
        try:
            resume(hop, flags["resume"]) if "resume" in flags else hop.main(tiny_args(**FLAGS | flags))
        except (ZeroDivisionError, LookupError) as error:
            found["refused"] = error.args[0]
    return found


def two_processes(out):
    os.environ |= {"RANK": str(int(os.fork() == 0)), "WORLD_SIZE": "2"}  # one import for both
    ranks = hop.init_ranks(CPU)
    rank, world, _ = ranks
    assert world == 2
    hop.init_ranks = lambda device: ranks  # one meeting is enough for many runs

    def forbidden(*_, **__):
        raise AssertionError("only the first rank writes")

    if rank > 0:
        for name in ("make_folders", "open_log", "log", "write_checkpoint"):
            setattr(hop, name, forbidden)
        pathlib.Path.mkdir = pathlib.Path.write_text = forbidden
    found = {"gradients": [gradient(slice(4 * rank, 4 * rank + 4), max_norm) for max_norm in (1e9, 0.1)]}
    found["whole"] = run(run_dir=f"{out}/whole")
    found["killed"] = run(4, run_dir=f"{out}/killed")
    (checkpoint,) = Path(f"{out}/killed").glob("*/checkpoint.pt")
    if rank == 0:  # for one process to try
        shutil.copy(checkpoint, f"{out}/kept.pt")
    hop.gather_ranks(None)
    found["resumed"] = run(resume=checkpoint)
    found["odd"] = run(num_envs=3, run_dir=f"{out}/odd")
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
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    environment = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, __file__, out]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
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
    """Batches are split, and none is smaller than asked"""
    assert [found["whole"]["batch_sizes"] for found in ranks[1]] == [(3, 9)] * 2
    first, second = (found["whole"] for found in ranks[1])
    for moment in ("start", "end"):
        for part in ("networks", "optimizers"):
            assert same_tree(first[moment][part], second[moment][part]), (moment, part)
        for part in ("games", "watched"):
            for name in ("env", "replay"):
                same = same_tree(first[moment][part][name], second[moment][part][name])
                assert not same or first[moment][part][name] == {}, (moment, part, name)
        assert not same_tree(first[moment]["random"], second[moment]["random"])
    assert not same_tree(first["start"]["networks"]["moa"], first["end"]["networks"]["moa"])
    replays = [found["end"]["games"]["replay"] for found in (first, second)]
    assert replays[0]["done"].shape == (2, 6, 8, 2), "of 4 games per seed each rank plays 2"
    assert not torch.equal(replays[0]["board"], replays[1]["board"])


def test_metrics_are_means_over_the_ranks(ranks):
    first, second = (found["whole"]["metrics"] for found in ranks[1])
    assert len(first) == len(second) == 4
    for (own, mean), (other, other_mean) in zip(first, second, strict=True):
        assert own.keys() == other.keys() == mean.keys()
        for name, x in mean.items():
            total, count = own[name] + other[name]
            expected = total if name.startswith("games/") else total / np.where(count > 0, count, np.nan)
            np.testing.assert_allclose(x, expected, rtol=1e-5, err_msg=name)
            np.testing.assert_array_equal(x, other_mean[name])
    assert (first[0][0]["real/value_mean"] != second[0][0]["real/value_mean"]).any()


def test_one_set_of_files(ranks, capsys):
    out, found = ranks
    folders = sorted((out / "whole").iterdir())
    assert len(folders) == 2 and [line["steps"] for line in lines_of(folders[1])] == [32, 64, 96, 128]
    saved = load(folders[0])
    assert len(saved["states"]) == 2 and saved["args"]["num_envs"] == 4
    for state, each in zip(saved["states"], found, strict=True):
        for part in ("games", "watched"):
            assert same_tree(state[part], each["whole"]["end"][part])
        assert each["odd"]["refused"] == "--num-envs must be a multiple of 2 ranks"
    assert not (out / "odd").exists()
    assert refused(capsys, resume, hop, out / "kept.pt") == "error: --resume: the run has 2 ranks, not 1"


def test_a_resumed_run_is_the_same_bit_for_bit(ranks):
    out, found = ranks
    for each in found:
        assert "end" in each["killed"] and len(each["killed"]["metrics"]) == 3
        for part, value in each["whole"]["end"].items():
            assert same_tree(value, each["resumed"]["end"][part]), part
        for part, value in each["killed"]["end"].items():
            assert part == "sums" or same_tree(value, each["resumed"]["start"][part]), part
    lines = [without_times(lines_of(sorted((out / name).iterdir())[1])) for name in ("whole", "killed")]
    assert lines[0] == lines[1] and len(lines[0]) == 4


if __name__ == "__main__":
    two_processes(sys.argv[1])
