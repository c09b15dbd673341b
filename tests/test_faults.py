"""Nothing is lost: kills, Ctrl-C, full disks, flipped bits, two resumes, moved and copied folders, damaged files"""

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import hopplus_mcts
import hopplus_ppo as hop
import pretrain_vae
import pretrain_world_model
import stag_hunt_env as game
from stag_hunt_env import Run, UserError

import pytest
import torch
from helpers import TINY_CONFIG, TINY_FLAGS, lines_of, same_tree, save_as_run, without_times

ROOT = Path(hop.__file__).resolve().parent
PPO = {**TINY_FLAGS, "num_envs": 8, "total_timesteps": 6 * 64, "save_seconds": 0.0}


def run(folder, **changes):
    return hop.main(hop.make_args("ppo", "cpu", **{**PPO, "run_dir": str(folder), **changes}))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run, half of it, and its folder"""
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
    return next(folder.glob("*__1__*/checkpoint.pt"))


def resume(checkpoint, **changes):
    return hop.main(hop.make_args(device="cpu", resume=str(checkpoint), **changes))


def load(path):
    return game.load_checkpoint(path, hop.FORMAT, hop.KEYS)


def states(path):
    return torch.load(path, weights_only=True)["states"]


def first_folder(folder):
    return next(folder.glob("*__1__*"))


def same_as_whole(checkpoint, whole):
    ours, theirs = checkpoint.parent, first_folder(whole)
    rows = [without_times(lines_of(path)) for path in (ours, theirs)]
    return same_tree(states(checkpoint), states(theirs / "checkpoint.pt")) and rows[0] == rows[1]


def test_lines_after_the_checkpoint_are_dropped_whatever_they_are(whole, tmp_path, capsys):
    checkpoint = half_run(tmp_path, num_seeds=2)
    with open(checkpoint.parent / "metrics.jsonl", "a") as file:
        file.write("[" * 100_000 + '\n{"steps": 256, "charts/ret')
    resume(checkpoint)
    said = capsys.readouterr().out
    assert same_as_whole(checkpoint, whole) and "line 4 is broken" in said and "line 5 is broken" in said


def test_a_broken_line_before_it_is_reported(tmp_path, capsys):
    checkpoint = half_run(tmp_path)
    path = checkpoint.parent / "metrics.jsonl"
    lines = path.read_text().splitlines()
    lines[1] = lines[1][:40]
    path.write_text("\n".join(lines) + "\n")
    resume(checkpoint)
    assert f"{path}: line 2 is broken" in capsys.readouterr().out
    assert [line["steps"] for line in lines_of(checkpoint.parent)] == [64, 192, 256, 320, 384]


@pytest.mark.parametrize("how", ["missing", "empty"])
def test_lost_metrics_are_said(how, tmp_path, capsys):
    checkpoint = half_run(tmp_path)
    path = checkpoint.parent / "metrics.jsonl"
    path.unlink() if how == "missing" else path.write_text("")
    resume(checkpoint)
    assert f"{path} is missing or empty" in capsys.readouterr().out and len(lines_of(checkpoint.parent)) == 3


def test_a_write_that_fails_leaves_the_metrics(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"steps": 1}\n')
    monkeypatch.setattr(Path, "write_text", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(OSError):
        game.keep_rows(path, 0)
    assert path.read_text() == '{"steps": 1}\n'


WORDS = [
    *("--device", "cpu", "--method", "ppo", "--num-envs", "8", "--num-steps", "8", "--policy-hidden", "8"),
    *("--height", "3", "--total-timesteps", "100000000", "--update-epochs", "1"),
]


def start(folder, *words, script="hopplus_ppo.py"):
    command = [sys.executable, str(ROOT / script), "--run-dir", str(folder), *words]
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
    (checkpoint,) = tmp_path.glob("*/checkpoint.pt")
    assert process.returncode == code
    assert said.splitlines()[-1].endswith(f"--resume {checkpoint}") and said.splitlines()[-1].startswith(
        "stopped; go on"
    )
    saved = load(checkpoint)
    assert saved["iteration"] * 64 == lines_of(checkpoint.parent)[-1]["steps"]


def test_a_killed_run_goes_on_bit_for_bit(whole, tmp_path):
    process = start(tmp_path, *WORDS, "--save-seconds", "0")
    checkpoint = wait_for(tmp_path, "*/checkpoint.pt")
    time.sleep(random.random())
    process.kill()
    process.communicate()
    kept = shutil.copytree(checkpoint.parent, tmp_path / "kept") / "checkpoint.pt"
    iteration, found = load(kept)["iteration"], []
    for path in (checkpoint, kept):
        resume(path, total_timesteps=64 * (iteration + 3))
        found.append(states(path))
    assert same_tree(*found) and load(kept)["iteration"] == iteration + 3


def test_runs_that_begin_in_the_same_second_have_folders_of_their_own(tmp_path, monkeypatch):
    """Also if none saw the others' folders when it looked, and with seeds in common"""
    monkeypatch.setattr(game.time, "time", lambda: 1000.5)
    monkeypatch.setattr(Path, "glob", lambda *_: iter(()))
    runs = []
    for seed in (2, 1, 1, 2):
        args = hop.make_args("ppo", "cpu", **PPO | {"num_seeds": 2, "seed": seed}, run_dir=str(tmp_path / "runs"))
        runs.append(Run(args, "any", None, 0))
    folders = [[folder.name.split("__")[2:] for folder in run.folders] for run in runs]
    assert folders == [[["2", "1000"], ["3", "1000"]], [["1", "1001"], ["2", "1001"]],
                       [["1", "1002"], ["2", "1002"]], [["2", "1003"], ["3", "1003"]]]  # fmt: skip
    made = {path.name for path in (tmp_path / "runs").iterdir()}
    assert made == {folder.name for run in runs for folder in run.folders}, "and leave no others"
    for run in runs:
        run.close()


@pytest.mark.parametrize("how", ["moved", "copied"])
def test_a_run_goes_on_where_its_checkpoint_lies(how, whole, tmp_path):
    checkpoint = half_run(tmp_path / "runs", num_seeds=2)
    gone = torch.load(checkpoint, weights_only=True)
    gone["args"]["run_dir"] = "/proc/nowhere/runs"  # nobody looks there again
    save_as_run(checkpoint, gone)
    before = {path: path.read_bytes() for path in checkpoint.parent.parent.rglob("*") if path.is_file()}
    there = tmp_path / "elsewhere" / "renamed"
    shutil.copytree(checkpoint.parent, there)
    if how == "moved":
        shutil.rmtree(checkpoint.parent.parent)
    resume(there / "checkpoint.pt")
    assert same_as_whole(there / "checkpoint.pt", whole)
    if how == "copied":
        assert before == {path: path.read_bytes() for path in checkpoint.parent.parent.rglob("*") if path.is_file()}
    assert (there.parent / "renamed__2" / "metrics.jsonl").exists(), "the second seed's, beside it"


def test_every_flipped_bit_is_noticed(whole, tmp_path):
    data = (first_folder(whole) / "checkpoint.pt").read_bytes()
    path, choose = tmp_path / "checkpoint.pt", random.Random(1)
    for _ in range(100):
        place = choose.randrange(len(data))
        path.write_bytes(data[:place] + bytes([data[place] ^ 1 << choose.randrange(8)]) + data[place + 1 :])
        with pytest.raises(ValueError, match=r"checkpoint\.pt .* its checksum is wrong"):
            load(path)


def change(*path, to=None):
    """An edit of a checkpoint: what lies at `path` goes, or becomes `to` of it"""

    def edit(saved):
        for key in path[:-1]:
            saved = saved[key]
        if to is None:
            del saved[path[-1]]
        else:
            saved[path[-1]] = to(saved.get(path[-1]) if isinstance(saved, dict) else saved[path[-1]])

    return edit


POLICY = ("states", 0, "networks", "policy", "actor.weight")
DAMAGE = {
    "its states is missing": change("states"),
    "its iteration is missing": change("iteration"),
    "networks.policy.actor.weight is missing": change(*POLICY),
    "games.last_joint is missing": change("states", 0, "games", "last_joint"),
    "games.history is missing": change("states", 0, "games", "history"),
    "state.position is missing": change("states", 0, "games", "env", "state.position"),
    "cpu_random is missing": change("states", 0, "cpu_random"),
    "games.seats is missing": change("states", 0, "games", "seats"),
    "replay.pushed is missing": change("states", 0, "games", "replay", "pushed"),
    "games.last_joint was saved as": change("states", 0, "games", "last_joint", to=lambda x: x[:, :1]),
    "its seconds is missing": change("seconds"),
    "its script is missing": change("script"),
    "unexpected keyword argument 'colour'": change("args", "colour", to=lambda _: "red"),
    "its flags are not those of this script": change("args", "gamma", to=lambda _: "high"),
    "was saved as torch.float32 [6, 8, 2]": change(*POLICY, to=lambda x: x[..., :2]),
    "was saved as torch.float64": change(*POLICY, to=lambda x: x.double()),
    "holds values that are no numbers": change(*POLICY, to=lambda x: x * torch.nan),
}


@pytest.mark.parametrize("said", DAMAGE)
def test_damaged_checkpoints_are_refused_by_name(said, whole, tmp_path):
    saved = torch.load(first_folder(whole) / "checkpoint.pt", weights_only=True)
    DAMAGE[said](saved)
    save_as_run(tmp_path / "checkpoint.pt", saved)
    with pytest.raises(ValueError) as error:
        resume(tmp_path / "checkpoint.pt")
    assert said in str(error.value) and "\n" not in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint.pt"]


def test_models_with_weights_missing_are_refused(tmp_path):
    args = hop.make_args("hopplus", "cpu", **{**TINY_FLAGS, "run_dir": str(tmp_path / "runs")})
    weights = hop.make_networks(args, [1], torch.device("cpu")).world.state_dict()
    content = {
        "format": pretrain_world_model.FORMAT,
        "must_match": {},
        "networks": {"world": dict(list(weights.items())[:6])},
    }
    save_as_run(tmp_path / "world.pt", content)
    with pytest.raises(ValueError, match="is missing in what was saved"):
        hop.main(hop.dataclasses.replace(args, world_model_checkpoint=str(tmp_path / "world.pt")))
    assert not (tmp_path / "runs").exists()


BAD = [
    ("--exp-name ../evil", "--exp-name must be a name"),
    ("--exp-name /x", "--exp-name must be a name"),
    (f"--exp-name {'x' * 300}", "--exp-name must be a name"),
    ("--resume=", "--resume is no run folder"),
    ("--run-dir=", "--run-dir must name a folder"),
    ("--run-dir /proc/nowhere", "could not write to /proc/nowhere: No such file or directory"),
    ("--seed 9999999999999", "--seed must be below 2**40"),
    ("--max-wall-pieces 100000", "--max-wall-pieces 100000 is more than"),
]


@pytest.mark.parametrize(("words", "said"), BAD, ids=[words[:30] for words, _ in BAD])
@pytest.mark.parametrize("script", [hop, hopplus_mcts, pretrain_vae, pretrain_world_model], ids=lambda x: x.__name__)
def test_flags_that_can_only_fail_later_are_refused_at_once(script, words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [script.__file__, "--device", "cpu", *words.split()])
    with pytest.raises(SystemExit) as stop:
        script.game.command_line(script.parse_args, script.main)
    printed = capsys.readouterr()
    assert stop.value.code == 2 and printed.err.startswith("error: ") and said in printed.err
    assert printed.err.count("\n") == 1 and not list(tmp_path.iterdir())


def test_a_full_disk_ends_in_one_line(whole, tmp_path, monkeypatch, capsys):
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


def test_a_folder_that_is_gone_ends_in_one_line(tmp_path, monkeypatch):
    log = Run.log

    def gone(run, step, rows):
        if step == 128:
            shutil.rmtree(run.folders[0])
        log(run, step, rows)

    monkeypatch.setattr(Run, "log", gone)
    with pytest.raises(UserError, match=r"could not write .*metrics\.jsonl: No such file"):
        run(tmp_path)


def test_a_checkpoint_is_on_the_disk_before_it_takes_its_name(tmp_path, monkeypatch):
    """Else a power cut could leave an empty one under the name of the one before"""
    done, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (done.append(os.fstat(file).st_size), fsync(file)))
    monkeypatch.setattr(os, "replace", lambda *paths: (done.append("renamed"), replace(*paths)))
    args = hop.make_args("ppo", "cpu", **PPO, run_dir=str(tmp_path))
    run = Run(args, "any", None, 0)
    done.clear()
    run.save({"format": "any"})
    run.close()
    checkpoint = run.folders[0] / "checkpoint.pt"
    assert done == [checkpoint.stat().st_size, "renamed"]
    assert torch.load(checkpoint, weights_only=True) == {"format": "any", "folders": [run.folders[0].name]}


def test_a_run_folder_that_cannot_be_made_ends_in_one_line(tmp_path, monkeypatch):
    checkpoint = half_run(tmp_path)
    monkeypatch.setattr(Path, "write_text", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
    with pytest.raises(UserError, match=rf"could not write to .*{checkpoint.parent.name}: No space left"):
        resume(checkpoint)


@pytest.mark.parametrize("script", [pretrain_vae, pretrain_world_model], ids=lambda x: x.__name__)
def test_pretraining_that_explodes_stops(script, tmp_path, capsys):
    sizes = (
        {"num_samples": 500} if script is pretrain_vae else {"num_transitions": 500, "num_updates": 20, "log_every": 5}
    )
    values = {
        "learning_rate": 1e30,
        "held_out_games": 8,
        "config": TINY_CONFIG,
        "run_dir": str(tmp_path),
        "device": "cpu",
    }
    with pytest.raises(FloatingPointError, match=r"^losses/.* is \[(nan|inf)"):
        script.main(script.dataclasses.replace(script.make_args(), **values, **sizes))
    assert "nan" not in capsys.readouterr().out


def test_a_default_checkpoint_is_small(tmp_path):
    """HOP+ with the flags of a CPU run: replay and all"""
    args = hop.make_args("hopplus", "cpu", pretraining_updates=1, pretraining_games=2, subgoal_batch_size=2)
    state = hop.make_train_state(args, [["learner"] * 4], [1], torch.device("cpu"))
    hop.pretrain(args, state, [1], 0)
    transitions = hop.rollout(args, state.games, state.networks, args.num_steps)[0]
    for _ in range(args.replay_rollouts):
        state.games.replay.push(transitions)
    save_as_run(tmp_path / "checkpoint.pt", {"states": [state.state_dict()]})
    assert (tmp_path / "checkpoint.pt").stat().st_size < 25e6
