"""Nothing is lost: kills, Ctrl-C, full disks, flipped bits, moved folders; what does not fit is refused"""

import errno
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import hopplus_ppo as hop

import pytest
import torch
from helpers import TINY_FLAGS, lines_of, same_tree, tiny_args, train_tiny, without_times, write_checkpoint
from test_runs import load, refused, resume

ROOT = Path(hop.__file__).resolve().parent
PPO = {**TINY_FLAGS, "num_envs": 8, "total_timesteps": 6 * 64, "save_seconds": 0.0, "num_seeds": 2}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The first folder of a run"""
    return train_tiny(tmp_path_factory.mktemp("whole"), "ppo", **PPO)[0]


def half_run(run_dir):
    """A run of which the second half is lost -> its first folder"""
    made, train_iteration = [], hop.train_iteration

    def dies(state):
        made.append(1)
        if len(made) == 4:
            raise ZeroDivisionError("killed")
        return train_iteration(state)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(hop, "train_iteration", dies)
        train_tiny(run_dir, "ppo", **PPO)
    return next(run_dir.glob("*__1__*"))


def same_run(folder, other):
    rows = [without_times(lines_of(path)) for path in (folder, other)]
    return same_tree(load(folder)["states"], load(other)["states"]) and rows[0] == rows[1]


# ---- Stopped, killed, moved

WORDS = [
    *("--device", "cpu", "--method", "ppo", "--num-envs", "8", "--num-steps", "8", "--policy-hidden", "8"),
    *("--height", "3", "--total-timesteps", "100000000", "--update-epochs", "1"),
]


def start(run_dir, *words):
    command = [sys.executable, str(ROOT / "hopplus_ppo.py"), "--run-dir", str(run_dir), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def wait_for(folder, pattern, seconds=60):
    """-> a file with something in it"""
    for _ in range(20 * seconds):
        for path in folder.glob(pattern):
            if path.stat().st_size:
                return path
        time.sleep(0.05)
    raise AssertionError(f"no {pattern} after {seconds} s")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_run_leaves_a_checkpoint_and_says_how_to_go_on(number, code, tmp_path):
    process = start(tmp_path, *WORDS, "--save-seconds", "1000")
    wait_for(tmp_path, "*/metrics.jsonl")
    process.send_signal(number)
    said, _ = process.communicate(timeout=60)
    (folder,) = tmp_path.iterdir()
    assert process.returncode == code
    resuming, *others = [line for line in said.splitlines() if line.startswith("python ")]
    resumed = re.fullmatch(r"python \S+hopplus_ppo.py --resume (\S+)", resuming)[1]
    assert Path(resumed).resolve() == folder and [line.split()[1] for line in others] == [
        "evaluation/evaluate.py",
        "evaluation/inspector.py",
    ]
    assert load(folder)["iteration"] * 64 == lines_of(folder)[-1]["steps"]


def test_a_killed_run_goes_on_bit_for_bit(tmp_path):
    process = start(tmp_path, *WORDS, "--save-seconds", "0")
    folder = wait_for(tmp_path, "*/checkpoint.pt").parent
    time.sleep(random.random())
    process.kill()
    process.communicate()
    kept = Path(shutil.copytree(folder, tmp_path / "kept"))
    iteration, found = load(kept)["iteration"], []
    for path in (folder, kept):
        resume(path, total_timesteps=64 * (iteration + 3))
        found.append(load(path)["states"])
    assert same_tree(*found) and load(kept)["iteration"] == iteration + 3


def test_half_a_line_after_the_checkpoint_is_dropped(whole, tmp_path):
    """Also where the run was moved"""
    moved = Path(shutil.move(half_run(tmp_path / "runs").parent, tmp_path / "elsewhere"))
    folder, second = sorted(moved.iterdir())
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"steps": 256, "charts/ret')
    resume(folder)
    assert same_run(folder, whole) and not (tmp_path / "runs").exists()
    assert without_times(lines_of(second)) == without_times(lines_of(sorted(whole.parent.iterdir())[1]))


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
    resume(folder)
    assert same_run(folder, whole)


def test_what_cannot_be_written_ends_in_one_line(tmp_path):
    """Here the run's folder"""
    (tmp_path / "file").touch()
    process = start(tmp_path / "file", *WORDS)
    (line,) = process.communicate(timeout=60)[1].splitlines()
    assert process.returncode == 1 and line.startswith("error: cannot write: ") and "Not a directory" in line


def test_a_checkpoint_is_on_the_disk_before_it_takes_its_name(tmp_path, monkeypatch):
    """Else a power cut could leave an empty one under the name of the one before"""
    done, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (done.append(os.fstat(file).st_size), fsync(file)))
    monkeypatch.setattr(os, "replace", lambda *paths: (done.append("renamed"), replace(*paths)))
    write_checkpoint(tmp_path / "checkpoint.pt", {"some": "thing"})
    assert done == [(tmp_path / "checkpoint.pt").stat().st_size, "renamed"]


# ---- What is refused


def test_every_flipped_bit_is_noticed(whole, tmp_path, capsys):
    data = (whole / "checkpoint.pt").read_bytes()
    path, choose = tmp_path / "checkpoint.pt", random.Random(1)
    for _ in range(30):
        place = choose.randrange(len(data))
        path.write_bytes(data[:place] + bytes([data[place] ^ 1 << choose.randrange(8)]) + data[place + 1 :])
        assert refused(capsys, load, path).endswith("its checksum is wrong")


@pytest.fixture(scope="module")
def files(whole, tmp_path_factory):
    """Checkpoints that do not fit, and what is none"""
    folder = tmp_path_factory.mktemp("files")

    def edited(name, edit):
        saved = load(whole)
        saved.pop("folder")
        edit(saved)
        write_checkpoint(folder / f"{name}.pt", saved)

    def policy(saved):
        return saved["states"][0]["networks"]["policy"]

    edited("wider", lambda saved: policy(saved).update({"actor.weight": policy(saved)["actor.weight"][..., :2]}))
    edited("nameless", lambda saved: policy(saved).pop("actor.weight"))
    edited("two ranks", lambda saved: saved.update(states=saved["states"] * 2))
    edited("of the VAE", lambda saved: saved.update(format=hop.PRETRAINED["vae_checkpoint"]))
    (folder / "cut.pt").write_bytes((whole / "checkpoint.pt").read_bytes()[:-5000])
    (folder / "text.pt").write_text("not a checkpoint")
    return folder


REFUSED = [
    ("missing.pt", "there is no "),
    ("", "there is no "),
    ("cut.pt", "is damaged or no checkpoint: its checksum is wrong"),
    ("text.pt", "is damaged or no checkpoint: its checksum is wrong"),
    ("of the VAE.pt", f"is a checkpoint of {hop.PRETRAINED['vae_checkpoint']}, not of {hop.FORMAT}"),
    ("wider.pt", "networks.policy.actor.weight is [6, 8, 2], here [6, 8, 7]"),
    ("nameless.pt", "only there or only here is networks.policy.actor.weight"),
    ("two ranks.pt", "the run has 2 ranks, not 1"),
]


@pytest.mark.parametrize(("name", "said"), REFUSED)
def test_what_does_not_fit_is_refused_in_one_line(name, said, files, capsys):
    before = sorted(files.rglob("*"))
    assert said in refused(capsys, resume, files / name)
    assert sorted(files.rglob("*")) == before


def test_a_checkpoint_runs_no_code(tmp_path, capsys):
    """Whoever loads this one with pickle makes a file"""

    class Forged:
        def __reduce__(self):
            return Path.touch, (tmp_path / "executed",)

    write_checkpoint(tmp_path / "forged.pt", {"states": Forged()})
    assert "is damaged or no checkpoint" in refused(capsys, load, tmp_path / "forged.pt")
    assert not (tmp_path / "executed").exists()
    assert torch.load(tmp_path / "forged.pt", weights_only=False) and (tmp_path / "executed").exists()
