"""Nothing is lost: kills, Ctrl-C, full disks, flipped bits; what does not fit is refused"""

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import hopplus_ppo as hop

import pytest
import torch
from helpers import lines_of, refused, resume, same_tree, start_script, tiny_args, train_tiny, without_times
from test_runs import load

PPO = {"num_envs": 8, "total_timesteps": 6 * 64, "save_seconds": 0.0, "num_seeds": 2}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The first folder of a run"""
    return train_tiny(tmp_path_factory.mktemp("whole"), "ppo", **PPO)[0]


# ---- Stopped, killed

WORDS = [
    *("--device", "cpu", "--method", "ppo", "--num-envs", "8", "--num-steps", "8", "--policy-hidden", "8"),
    *("--height", "3", "--total-timesteps", "100000000", "--update-epochs", "1"),
]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_run_leaves_a_checkpoint_and_says_how_to_go_on(number, code, tmp_path, monkeypatch, capsys):
    """The iteration in which it is stopped is finished"""
    train_iteration = hop.train_iteration

    def interrupted(state):
        signal.raise_signal(number)
        return train_iteration(state)

    monkeypatch.setattr(hop, "train_iteration", interrupted)
    signal.signal(number, lambda *_: pytest.fail("the script does not listen"))
    with pytest.raises(SystemExit) as stop:
        start_script(hop, *WORDS, "--save-seconds", "1000", "--run-dir", tmp_path)
    (folder,) = tmp_path.iterdir()
    assert stop.value.code == code
    said = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("python ")]
    scripts = ["hopplus_ppo.py", "evaluation/evaluate.py", "evaluation/inspector.py"]
    assert [words[1] for words in said] == scripts and said[0][2] == "--resume"
    assert {Path(words[-1]).resolve() for words in said} == {folder}
    assert load(folder)["iteration"] == 1 and lines_of(folder)[0]["steps"] == 64


def test_a_killed_run_goes_on_bit_for_bit(tmp_path):
    command = [sys.executable, hop.__file__, "--run-dir", str(tmp_path), *WORDS, "--save-seconds", "0"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    found = []
    while not found:
        assert process.poll() is None, "it runs for hours"
        time.sleep(0.05)
        found = list(tmp_path.glob("*/checkpoint.pt"))
    time.sleep(random.random())
    process.kill()
    process.wait()
    kept = Path(shutil.copytree(found[0].parent, tmp_path / "kept"))
    iteration = load(kept)["iteration"]
    states = []
    for path in (found[0], kept):
        resume(hop, path, total_timesteps=64 * (iteration + 3))
        states.append(load(path)["states"])
    assert same_tree(*states) and load(kept)["iteration"] == iteration + 3


def test_runs_that_begin_in_the_same_second_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(hop.time, "time", lambda: 1000.5)
    folders = []
    for seed in (2, 1, 1, 2):
        args = tiny_args("ppo", num_seeds=2, seed=seed, run_dir=str(tmp_path))
        folders.append([folder.name.split("__")[2:] for folder in hop.make_folders(args, "any")])
    names = {tuple(name) for run in folders for name in run}
    assert len(names) == 8, "no folder is shared"
    assert all(len({stamp for _, stamp in run}) == 1 for run in folders), "those of a run end alike"


# ---- Disks


def test_a_full_disk_leaves_the_checkpoint_before(whole, tmp_path, monkeypatch):
    """The first checkpoint is written, the second finds no room"""
    fsync, calls = os.fsync, []

    def full(file):
        calls.append(file)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(file)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(os, "fsync", full)
        train_tiny(tmp_path, "ppo", **PPO)
    folder = next(tmp_path.glob("*__1__*"))
    assert load(folder)["iteration"] == 1
    resume(hop, folder)
    assert same_tree(load(folder)["states"], load(whole)["states"])
    assert without_times(lines_of(folder)) == without_times(lines_of(whole))


def test_what_cannot_be_written_ends_in_one_line(tmp_path, capsys):
    """Here the run's folder"""
    (tmp_path / "file").touch()
    line = refused(capsys, start_script, hop, *WORDS, "--run-dir", tmp_path / "file")
    assert line.startswith("error: cannot write: ") and "Not a directory" in line


def test_a_checkpoint_is_on_the_disk_before_it_takes_its_name(tmp_path, monkeypatch):
    """Else a power cut could leave an empty one under the name of the one before"""
    done, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (done.append(os.fstat(file).st_size), fsync(file)))
    monkeypatch.setattr(os, "replace", lambda *paths: (done.append("renamed"), replace(*paths)))
    hop.write_checkpoint(tmp_path / "checkpoint.pt", {"some": "thing"})
    assert done == [(tmp_path / "checkpoint.pt").stat().st_size, "renamed"]


# ---- What is refused


def test_every_flipped_bit_is_noticed(whole, tmp_path, capsys):
    data = (whole / "checkpoint.pt").read_bytes()
    path, choose = tmp_path / "checkpoint.pt", random.Random(1)
    for _ in range(30):
        place = choose.randrange(len(data))
        path.write_bytes(data[:place] + bytes([data[place] ^ 1 << choose.randrange(8)]) + data[place + 1 :])
        assert refused(capsys, load, path).endswith("is damaged or no checkpoint: its checksum is wrong")
    path.write_bytes(data[:-5000])
    assert refused(capsys, load, path).endswith("its checksum is wrong")


def test_weights_that_do_not_fit_are_refused_by_name(whole, tmp_path, capsys):
    saved = load(whole)
    saved.pop("folder")
    weights = saved["states"][0]["networks"]["policy"]
    actor = weights.pop("actor.weight")
    for changes, said in (
        ({"actor.weight": actor[..., :2]}, "networks.policy.actor.weight is [6, 8, 2], here [6, 8, 7]"),
        ({}, "only there or only here is networks.policy.actor.weight"),
    ):
        saved["states"][0]["networks"]["policy"] = weights | changes
        hop.write_checkpoint(tmp_path / "checkpoint.pt", saved)
        assert said in refused(capsys, resume, hop, tmp_path)
    assert "there is no " in refused(capsys, resume, hop, tmp_path / "missing.pt")


def test_a_checkpoint_runs_no_code(tmp_path, capsys):
    """Whoever loads this one with pickle makes a file"""

    class Forged:
        def __reduce__(self):
            return Path.touch, (tmp_path / "executed",)

    hop.write_checkpoint(tmp_path / "forged.pt", {"states": Forged()})
    assert "is damaged or no checkpoint" in refused(capsys, load, tmp_path / "forged.pt")
    assert not (tmp_path / "executed").exists()
    assert torch.load(tmp_path / "forged.pt", weights_only=False) and (tmp_path / "executed").exists()
