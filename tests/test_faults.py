"""Nothing is lost: kills, Ctrl-C, full disks, flipped bits, moved folders; what does not fit is refused"""

import errno
import os
import pickle
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import hopplus_ppo as hop
import pretrain_vae
import stag_hunt_env as game
from stag_hunt_env import Run, UserError

import pytest
import torch
from helpers import TINY_FLAGS, lines_of, same_tree, without_times, write_checkpoint

ROOT = Path(hop.__file__).resolve().parent
PPO = {**TINY_FLAGS, "num_envs": 8, "total_timesteps": 6 * 64, "save_seconds": 0.0}


def run(folder, **changes):
    return hop.main(hop.make_args("ppo", "cpu", **{**PPO, "run_dir": str(folder), **changes}))


def first_folder(folder):
    return next(folder.glob("*__1__*"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run, and its folder"""
    folder = tmp_path_factory.mktemp("whole")
    run(folder, num_seeds=2)
    return folder


def half_run(folder, **changes):
    """A run of which the second half is lost -> its checkpoint"""
    made, train_iteration = [], hop.train_iteration

    def dies(state):
        made.append(1)
        if len(made) == 4:
            raise ZeroDivisionError("killed")
        return train_iteration(state)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(hop, "train_iteration", dies)
        run(folder, **changes)
    return first_folder(folder) / "checkpoint.pt"


def resume(checkpoint, **changes):
    return hop.main(hop.make_args(device="cpu", resume=str(checkpoint), **changes))


def load(path):
    return game.load_checkpoint(path, hop.FORMAT)


def same_as_whole(checkpoint, whole):
    ours, theirs = checkpoint.parent, first_folder(whole)
    rows = [without_times(lines_of(path)) for path in (ours, theirs)]
    states = [load(path)["states"] for path in (ours, theirs)]
    return same_tree(*states) and rows[0] == rows[1]


# ---------------------------------------------------------------------------------------------------------------------
# Stopped, killed, moved


WORDS = [
    *("--device", "cpu", "--method", "ppo", "--num-envs", "8", "--num-steps", "8", "--policy-hidden", "8"),
    *("--height", "3", "--total-timesteps", "100000000", "--update-epochs", "1"),
]


def start(folder, *words):
    command = [sys.executable, str(ROOT / "hopplus_ppo.py"), "--run-dir", str(folder), *words]
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
    folder = tmp_path / "my runs"
    process = start(folder, *WORDS, "--save-seconds", "1000")
    wait_for(folder, "*/metrics.jsonl")
    process.send_signal(number)
    said, _ = process.communicate(timeout=60)
    (checkpoint,) = folder.glob("*/checkpoint.pt")
    assert process.returncode == code
    command = said.splitlines()[-1].removeprefix("stopped; go on with: ")
    assert shlex.split(command)[-2:] == ["--resume", str(checkpoint)], "it can be pasted"
    assert load(checkpoint)["iteration"] * 64 == lines_of(checkpoint.parent)[-1]["steps"]


def test_a_killed_run_goes_on_bit_for_bit(tmp_path):
    process = start(tmp_path, *WORDS, "--save-seconds", "0")
    checkpoint = wait_for(tmp_path, "*/checkpoint.pt")
    time.sleep(random.random())
    process.kill()
    process.communicate()
    kept = shutil.copytree(checkpoint.parent, tmp_path / "kept") / "checkpoint.pt"
    iteration, found = load(kept)["iteration"], []
    for path in (checkpoint, kept):
        resume(path, total_timesteps=64 * (iteration + 3))
        found.append(load(path)["states"])
    assert same_tree(*found) and load(kept)["iteration"] == iteration + 3


def test_half_a_line_after_the_checkpoint_is_dropped(whole, tmp_path):
    checkpoint = half_run(tmp_path, num_seeds=2)
    with open(checkpoint.parent / "metrics.jsonl", "a") as file:
        file.write('{"steps": 256, "charts/ret')
    resume(checkpoint)
    assert same_as_whole(checkpoint, whole)


def test_a_run_goes_on_where_its_checkpoint_lies(whole, tmp_path):
    checkpoint = half_run(tmp_path / "runs", num_seeds=2)
    there = tmp_path / "elsewhere" / "renamed"
    shutil.copytree(checkpoint.parent, there)
    shutil.rmtree(tmp_path / "runs")
    resume(there / "checkpoint.pt")
    assert same_as_whole(there / "checkpoint.pt", whole) and not (tmp_path / "runs").exists()
    assert (there.parent / "renamed__2" / "metrics.jsonl").exists(), "the second seed's, beside it"


def test_runs_that_begin_in_the_same_second_have_folders_of_their_own(tmp_path, monkeypatch):
    """Also if none saw the others' folders when it looked, and with seeds in common"""
    monkeypatch.setattr(game.time, "time", lambda: 1000.5)
    monkeypatch.setattr(Path, "glob", lambda *_: iter(()))
    folders = []
    for seed in (2, 1, 1, 2):
        args = hop.make_args("ppo", "cpu", **PPO | {"num_seeds": 2, "seed": seed}, run_dir=str(tmp_path))
        run = Run(args, "any", None, 0)
        run.close()
        folders += [folder.name.split("__")[2:] for folder in run.folders]
    assert folders[:4] == [["2", "1000"], ["3", "1000"], ["1", "1001"], ["2", "1001"]]
    assert folders[4:] == [["1", "1002"], ["2", "1002"], ["2", "1003"], ["3", "1003"]]
    assert len(list(tmp_path.iterdir())) == 8, "and leave no others"


# ---------------------------------------------------------------------------------------------------------------------
# Disks


def test_a_full_disk_ends_in_one_line(tmp_path, monkeypatch):
    """The first checkpoint is written, the second finds no room"""
    save, calls = torch.save, []

    def full(content, path):
        calls.append(path)
        if len(calls) == 2:
            Path(path).write_bytes(b"half")
            raise RuntimeError("[enforce fail at inline_container.cc] . PytorchStreamWriter failed writing file\nmore")
        save(content, path)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(UserError, match=r"could not write .*checkpoint.pt, an earlier one there is untouched") as error:
        run(tmp_path)
    assert "\n" not in str(error.value)
    monkeypatch.setattr(torch, "save", save)
    checkpoint = first_folder(tmp_path) / "checkpoint.pt"
    assert load(checkpoint)["iteration"] == 1
    resume(checkpoint)
    assert len(lines_of(checkpoint.parent)) == 6


def test_a_checkpoint_is_on_the_disk_before_it_takes_its_name(tmp_path, monkeypatch):
    """Else a power cut could leave an empty one under the name of the one before"""
    done, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (done.append(os.fstat(file).st_size), fsync(file)))
    monkeypatch.setattr(os, "replace", lambda *paths: (done.append("renamed"), replace(*paths)))
    run = Run(hop.make_args("ppo", "cpu", **PPO, run_dir=str(tmp_path)), "any", None, 0)
    done.clear()
    run.save({"format": "any"})
    run.close()
    assert done == [(run.folders[0] / "checkpoint.pt").stat().st_size, "renamed"]


def test_a_write_that_fails_leaves_the_metrics(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"steps": 1}\n')
    monkeypatch.setattr(Path, "write_text", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(OSError):
        game.keep_rows(path, 0)
    assert path.read_text() == '{"steps": 1}\n'


# ---------------------------------------------------------------------------------------------------------------------
# What is refused


def test_every_flipped_bit_is_noticed(whole, tmp_path):
    data = (first_folder(whole) / "checkpoint.pt").read_bytes()
    path, choose = tmp_path / "checkpoint.pt", random.Random(1)
    for _ in range(30):
        place = choose.randrange(len(data))
        path.write_bytes(data[:place] + bytes([data[place] ^ 1 << choose.randrange(8)]) + data[place + 1 :])
        with pytest.raises(ValueError, match=r"checkpoint\.pt .* its checksum is wrong"):
            load(path)


@pytest.fixture(scope="module")
def files(whole, tmp_path_factory):
    """Checkpoints that do not fit, and what is none"""
    folder, checkpoint = tmp_path_factory.mktemp("files"), first_folder(whole) / "checkpoint.pt"

    def edited(name, edit):
        saved = torch.load(checkpoint, weights_only=True)
        edit(saved)
        write_checkpoint(folder / f"{name}.pt", saved)

    def policy(saved):
        return saved["states"][0]["networks"]["policy"]

    edited("wider", lambda saved: policy(saved).update({"actor.weight": policy(saved)["actor.weight"][..., :2]}))
    edited("nameless", lambda saved: policy(saved).pop("actor.weight"))
    edited("coloured", lambda saved: saved["args"].update(colour="red"))
    edited("two ranks", lambda saved: saved.update(states=saved["states"] * 2))
    edited("abacus", lambda saved: saved.update(device="abacus"))
    edited("of the VAE", lambda saved: saved.update(format=pretrain_vae.FORMAT))
    (folder / "cut.pt").write_bytes(checkpoint.read_bytes()[:-5000])
    (folder / "text.pt").write_text("not a checkpoint")
    return folder


REFUSED = [
    ("missing.pt", "missing.pt: there is no checkpoint"),
    ("", "is no run folder: it has no args.json"),
    ("cut.pt", "cut short or no checkpoint: its checksum is wrong"),
    ("text.pt", "its checksum is wrong"),
    ("of the VAE.pt", f"is no checkpoint of this script: it is '{pretrain_vae.FORMAT}', not '{hop.FORMAT}'"),
    ("coloured.pt", "its flags are not those of this script"),
    ("wider.pt", "networks.policy.actor.weight was saved as torch.float32 [6, 8, 2], but here it is"),
    ("nameless.pt", "networks.policy.actor.weight is missing in what was saved"),
    ("two ranks.pt", "goes on on 2 rank(s) on cpu only"),
    ("abacus.pt", "goes on on 1 rank(s) on abacus only"),
]


@pytest.mark.parametrize(("name", "said"), REFUSED)
def test_what_does_not_fit_is_refused_in_one_line(name, said, files):
    before = sorted(files.rglob("*"))
    with pytest.raises(UserError) as error:
        resume(files / name)
    assert said in str(error.value) and "\n" not in str(error.value)
    assert sorted(files.rglob("*")) == before


def test_a_checkpoint_runs_no_code(tmp_path):
    """Whoever loads this one with pickle makes a file"""

    class Forged:
        def __reduce__(self):
            return Path.touch, (tmp_path / "executed",)

    write_checkpoint(tmp_path / "forged.pt", {"format": hop.FORMAT, "states": Forged()})
    with pytest.raises(pickle.UnpicklingError):
        load(tmp_path / "forged.pt")
    assert not (tmp_path / "executed").exists()
