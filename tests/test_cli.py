"""What the game refuses, and how flags are read and wrong ones refused."""

import dataclasses
import math
import os
import subprocess
import sys
from pathlib import Path

import stag_hunt_env
from stag_hunt_env import (
    Count,
    Fraction,
    Positive,
    Reward,
    SeatFlags,
    StagHuntConfig,
    StagHuntEnv,
    StagHuntGymEnv,
    StagHuntParallelEnv,
    UserError,
    check_ranges,
    command_line,
    early_flags,
    parse,
    seats_table,
)

import pytest
import torch

ROOT = Path(stag_hunt_env.__file__).resolve().parent


def actions(shape=(3, 4), fill=4, dtype=torch.int64):
    return torch.full(shape, fill, dtype=dtype)


BAD_CONFIGS = [  # fields, and what the error must name
    ({"height": 2, "width": 2}, ["9", "4"]),
    ({"height": 0}, ["--height must be >= 1, not 0"]),
    ({"num_players": 9}, ["--num-players must be 2 to 8, not 9"]),
    ({"hare_reward": float("-inf")}, ["--hare-reward must be -1e6 to 1e6, not -inf"]),
    ({"max_wall_pieces": 17}, ["17", "16"]),
]
BAD_CALLS = [
    (lambda env: env.step(actions((3, 5))), ["[3, 4]", "[3, 5]"]),
    (lambda env: env.step(actions(dtype=torch.float32)), ["float32"]),
    (lambda env: env.step(actions(fill=-1)), ["6", "-1"]),
    (lambda env: env.transition(env.state, actions(fill=7)), ["6", "7"]),
    (lambda env: StagHuntEnv(num_envs=0), ["0"]),
    (lambda env: StagHuntEnv(device="teapot"), ["teapot"]),
    (lambda env: seats_table(["random"] * 3, 4), ["3", "4"]),
    (lambda env: seats_table(["random", "randon"], 2), ["randon", "nearest_stag"]),
    (lambda env: StagHuntGymEnv(seats=("random",) * 4), ["1", "0"]),
    (lambda env: StagHuntGymEnv().step(4), ["reset"]),
    (lambda env: StagHuntParallelEnv().step({}), ["reset"]),
    (lambda env: StagHuntParallelEnv(render_mode="human"), ["human"]),
]  # fmt: skip


def refused(call, words):
    with pytest.raises(ValueError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in words), message


@pytest.mark.parametrize("fields, words", BAD_CONFIGS)
def test_bad_configs_are_refused(fields, words):
    refused(lambda: StagHuntConfig(**fields), words)


@pytest.mark.parametrize("call, words", BAD_CALLS)
def test_bad_calls_are_refused(call, words):
    env = StagHuntEnv(num_envs=3)
    before = [x.clone() for x in env.state]
    refused(lambda: call(env), words)
    assert all(torch.equal(x, y) for x, y in zip(before, env.state, strict=True))


@pytest.mark.parametrize("bad", [7, -1])
def test_wrappers_refuse_actions_out_of_range(bad):
    parallel, single = StagHuntParallelEnv(), StagHuntGymEnv()
    parallel.reset(seed=1)
    single.reset(seed=1)
    refused(lambda: parallel.step({**dict.fromkeys(parallel.agents, 4), "player_2": bad}), [str(bad)])
    refused(lambda: parallel.step({"player_0": 4, "player_3": 4}), ["player_1", "player_2"])
    refused(lambda: single.step(bad), [str(bad)])


BAD_COMMANDS = [
    ("--num-players 9", "--num-players must be 2 to 8, not 9"),
    ("--seats learner,random,random,random", "nobody learns here"),
    ("--nonsense", "--nonsense"),
    ("--seed -1", "--seed must be >= 0, not -1"),
    ("--gif nowhere/game.gif", "--gif: cannot write to 'nowhere/game.gif'"),
    ("--gif game.xyz", "--gif must name a file that ends with .gif"),
]


@pytest.mark.parametrize("words, said", BAD_COMMANDS)
def test_bad_commands_end_with_one_line_and_code_2(words, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["stag_hunt_env.py", *words.split()])
    with pytest.raises(SystemExit) as stop:
        command_line(stag_hunt_env.parse_args, stag_hunt_env.main)
    assert stop.value.code == 2
    printed = capsys.readouterr()
    (line,) = printed.err.strip().splitlines()
    assert line.startswith("error: ") and said in line and not printed.out, line


def test_a_game_is_shown_and_written_to_a_gif(tmp_path):
    image = pytest.importorskip("PIL.Image")
    words = f"--gif {tmp_path}/game.gif --seed 3 --num-players 5 --height 5 --final-time 9".split()
    command = [sys.executable, "stag_hunt_env.py", *words]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "t=0/9" in result.stdout and "S" in result.stdout
    with image.open(tmp_path / "game.gif") as gif:
        assert gif.n_frames > 1 and gif.size[0] == 4 * 108


def test_the_seed_decides_which_board_is_shown(capsys):
    boards = []
    for seed in (1, 2, 3, 1):
        config = StagHuntConfig(final_time=1)
        stag_hunt_env.main(stag_hunt_env.Args(seed=seed, seats="random,random,random,random", config=config))
        boards.append(capsys.readouterr().out.partition("t=0/")[0])
    assert boards[0] == boards[3] and len(set(boards)) == 3


# ---------------------------------------------------------------------------------------------------------------------
# Flags of any script


@dataclasses.dataclass
class RunArgs:
    method: str = "plain"
    """how to learn"""
    num_envs: Count = 8
    """games at once"""
    log: bool = True
    """write a log"""


@dataclasses.dataclass
class PPOArgs:
    gamma: Fraction = 0.99
    """discount"""
    learning_rate: Positive = 1e-3
    """step size"""
    horizon: Count | None = None
    """steps (None: all)"""
    offset: Reward = -1.0
    """added to the reward"""


@dataclasses.dataclass
class TestArgs(RunArgs, SeatFlags, PPOArgs):
    __test__ = False
    config: StagHuntConfig = dataclasses.field(default_factory=StagHuntConfig)


GROUPS = {"run": RunArgs, "game": StagHuntConfig, "seats": SeatFlags, "ppo": PPOArgs}
INF, NAN = math.inf, math.nan
RANGES = [  # field, what it must be, wrong, right
    ("num_envs", ">= 1", (0, -1, INF, NAN), (1, 10**15)),
    ("num_envs", "at most 1e+15", (10**15 + 1,), (5,)),
    ("gamma", "0 to 1", (-0.1, 1.1, INF, NAN), (0, 1, 0.5)),
    ("learning_rate", "> 0", (0, -1e-9, INF, NAN), (1e-30, 5)),
    ("horizon", ">= 1", (0, -3, NAN), (1, None)),
    ("offset", "-1e6 to 1e6", (INF, -INF, NAN, 1e39), (-1e6, 0)),
]


@pytest.mark.parametrize("name, text, wrong, right", RANGES)
def test_ranges(name, text, wrong, right):
    for value in right:
        check_ranges(TestArgs(**{name: value}))
    for value in wrong:
        said = f"--{name.replace('_', '-')} must be {text}, not {value}"
        refused(lambda value=value: check_ranges(TestArgs(**{name: value})), [said])


def read(words, **defaults):
    return parse(TestArgs, GROUPS, TestArgs(**defaults), words.split())


def test_flags_are_flat_and_start_from_the_defaults_that_are_given():
    board = StagHuntConfig(height=5, num_stags=2)
    assert read("") == TestArgs() and read("", gamma=0.5, config=board) == TestArgs(gamma=0.5, config=board)
    args = read("--num-envs 3 --no-log --gamma=0.9 --width 7 --horizon 4 --seats learner,mixed", config=board)
    config = dataclasses.replace(board, width=7)
    expected = TestArgs(num_envs=3, log=False, gamma=0.9, config=config, horizon=4, seats="learner,mixed")
    assert args == expected and type(args) is TestArgs
    assert read("--log", log=False).log and read("--horizon None", horizon=3).horizon is None


def test_help_shows_groups_and_true_defaults(capsys):
    with pytest.raises(SystemExit) as stop:
        read("--help", gamma=0.25, config=StagHuntConfig(height=6))
    text = " ".join(capsys.readouterr().out.split())
    assert stop.value.code in (0, None)
    places = [text.index(f"{name} options") for name in GROUPS]
    assert places == sorted(places)
    for part in ("discount (default: 0.25)", "rows of the board (default: 6)", "--log, --no-log", "--population STR"):
        assert part in text, part


def test_early_flags():
    words = ["--method=x", "--other", "3", "--run-dir", "y", "--flag"]
    assert early_flags(words, method="a", run_dir="b") == {"method": "x", "run_dir": "y"}
    words = ["--run_dir", "z", "--methods", "m", "--help"]
    assert early_flags(words, method="a", run_dir="b") == {"method": "a", "run_dir": "z"}
    assert early_flags(["--method"], method="a") == {"method": "a"}  # left for `parse` to refuse


# ---------------------------------------------------------------------------------------------------------------------
# How programs end and start


def ends_with(error, cause=None):
    def main(args):
        raise error from cause

    with pytest.raises(SystemExit) as stop:
        command_line(lambda words: None, main)
    return stop.value.code


def test_errors_for_the_user_end_with_one_line_and_mistakes_keep_their_traceback(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["program"])
    assert ends_with(UserError("not this")) == 2 and capsys.readouterr().err == "error: not this\n"
    assert ends_with(FloatingPointError("nan")) == 1 and capsys.readouterr().err == "error: nan\n"
    assert ends_with(KeyboardInterrupt()) == 130 and capsys.readouterr().err == "stopped\n"
    assert ends_with(RuntimeError("an import failed"), KeyboardInterrupt()) == 130  # torch's word for Ctrl-C
    for mistake in (ValueError, OSError, RuntimeError):
        with pytest.raises(mistake, match="not for users"):
            ends_with(mistake("not for users"))


@pytest.mark.parametrize(("given", "threads"), [({}, "1"), ({"OMP_NUM_THREADS": "2"}, "2")])
def test_one_thread_unless_more_are_asked_for(given, threads):
    """Two that wait for each other are four times slower beside a busy program"""
    source = "import stag_hunt_env, torch; stag_hunt_env.command_line(list, lambda _: print(torch.get_num_threads()))"
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    environment |= {"PYTHONPATH": path, **given}
    found = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, env=environment, check=False)
    assert found.stdout.strip() == threads


def test_ctrl_c_during_the_imports_ends_without_a_traceback(tmp_path):
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", "import hopplus_ppo"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, check=False)
    assert found.stderr == "stopped\n" and found.returncode in (130, -2)
