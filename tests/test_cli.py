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
    NonNegative,
    Positive,
    Reward,
    SeatFlags,
    StagHuntConfig,
    StagHuntEnv,
    StagHuntGymEnv,
    StagHuntParallelEnv,
    UserError,
    Whole,
    check_ranges,
    command_line,
    early_flags,
    parse,
    seats_table,
)

import gymnasium
import pytest
import torch
from helpers import seeded

ROOT = Path(stag_hunt_env.__file__).resolve().parent
no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


def actions(shape=(3, 4), fill=4, dtype=torch.int64):
    return torch.full(shape, fill, dtype=dtype)


BAD_CONFIGS = [  # fields, and what the error must name
    ({"height": 2, "width": 2}, ["9", "4"]),
    ({"height": 3, "width": 3, "num_players": 8, "num_hares": 1}, ["10", "9"]),
    ({"height": 0}, ["--height must be >= 1, not 0"]),
    ({"num_players": 1}, ["1"]),
    ({"num_players": 9}, ["9"]),
    ({"num_stags": -1}, ["-1"]),
    ({"num_hares": -2}, ["-2"]),
    ({"final_time": 0}, ["0"]),
    ({"stag_reward": float("nan")}, ["nan"]),
    ({"hare_reward": float("-inf")}, ["--hare-reward must be -1e6 to 1e6, not -inf"]),
    ({"max_wall_pieces": -1}, ["-1"]),
    ({"max_wall_pieces": 17}, ["17", "16"]),
    ({"max_wall_pieces": 10**9}, ["16"]),
    ({"steps_after_first_hunt": -1}, ["-1"]),
]
BAD_CALLS = [
    (lambda env: env.step(actions((3, 5))), ["[3, 4]", "[3, 5]"]),
    (lambda env: env.step(actions((4,))), ["[3, 4]", "[4]"]),
    (lambda env: env.step([[4] * 4] * 3), ["list"]),
    (lambda env: env.step(actions().numpy()), ["ndarray"]),
    (lambda env: env.step(actions(dtype=torch.float32)), ["float32"]),
    (lambda env: env.step(actions(fill=1, dtype=torch.bool)), ["bool"]),
    (lambda env: env.step(actions(fill=-1)), ["6", "-1"]),
    (lambda env: env.step(actions(fill=7)), ["6", "7"]),
    (lambda env: env.transition(env.state, actions((2, 4))), ["[3, 4]", "[2, 4]"]),
    (lambda env: env.transition(env.state, actions(dtype=torch.float64)), ["float64"]),
    (lambda env: env.transition(env.state, actions(fill=7)), ["7"]),
    (lambda env: env.transition(env.initial_state(2), actions()), ["[2, 4]", "[3, 4]"]),
    (lambda env: StagHuntEnv(num_envs=0), ["0"]),
    (lambda env: StagHuntEnv(num_envs=-5), ["-5"]),
    (lambda env: StagHuntEnv(device="teapot"), ["teapot"]),
    (lambda env: seats_table(["random"] * 3, 4), ["3", "4"]),
    (lambda env: seats_table(["random", "randon"], 2), ["randon", "nearest_stag"]),
    (lambda env: StagHuntGymEnv(seats=("random",) * 4), ["1", "0"]),
    (lambda env: StagHuntGymEnv(seats=("learner", "learner", "random", "random")), ["1", "2"]),
    (lambda env: StagHuntGymEnv(seats=("learner", "random")), ["2", "4"]),
    (lambda env: StagHuntGymEnv(seats=("learner", "random", "random", "somebody")), ["somebody"]),
    (lambda env: StagHuntGymEnv(seats="learner,mixed,random,random"), ["mixed"]),
    (lambda env: StagHuntGymEnv(seats="learner,random,random,switching"), ["switching"]),
    (lambda env: StagHuntGymEnv(render_mode="human"), ["human"]),
    (lambda env: StagHuntGymEnv().step(4), ["reset"]),
    (lambda env: StagHuntParallelEnv().step({}), ["reset"]),
    (lambda env: StagHuntParallelEnv(render_mode="human"), ["human"]),
    pytest.param(lambda env: StagHuntEnv(device="cuda"), ["cuda"], marks=no_cuda),
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
def test_faces_refuse_actions_out_of_range(bad):
    parallel, single = StagHuntParallelEnv(), gymnasium.make("StagHunt-v0").unwrapped
    parallel.reset(seed=1)
    single.reset(seed=1)
    refused(lambda: parallel.step({**dict.fromkeys(parallel.agents, 4), "player_2": bad}), [str(bad)])
    refused(lambda: parallel.step({"player_0": 4, "player_3": 4}), ["player_1", "player_2"])
    refused(lambda: single.step(bad), [str(bad)])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
def test_integer_actions_of_any_width_mean_the_same(dtype):
    env = StagHuntEnv(num_envs=50, seed=1)
    acts = torch.randint(7, (50, 4), generator=seeded(2))
    for ours, expected in zip(
        env.transition(env.state, acts.to(dtype))[1:], env.transition(env.state, acts)[1:], strict=True
    ):
        assert torch.equal(ours, expected)


def run_cli(*arguments):
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "stag_hunt_env.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)


BAD_COMMANDS = [
    (["--num-players", 9], ["--num-players must be 2 to 8, not 9"]),
    (["--height", 2, "--width", 2], ["9", "4"]),
    (["--seats", "random,random"], ["2", "4"]),
    (["--seats", "a,b,c,d"], ["'a'", "random"]),
    (["--seats", "learner,random,random,random"], ["learner"]),
    (["--nonsense"], ["--nonsense"]),
    (["--height", "four"], ["--height", "four"]),
    (["--height"], ["--height"]),
    (["--seed", -1], ["--seed must be >= 0, not -1"]),
]


@pytest.mark.parametrize("arguments, words", BAD_COMMANDS)
def test_bad_commands_end_with_one_line_and_code_2(arguments, words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["stag_hunt_env.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        command_line(stag_hunt_env.parse_args, stag_hunt_env.main)
    assert stop.value.code == 2
    printed = capsys.readouterr()
    (line,) = printed.err.strip().splitlines()
    assert line.startswith("error: ") and all(word in line for word in words) and not printed.out, line


@pytest.mark.parametrize("path", ["/proc/game.gif", "nowhere/game.gif", "{file}/game.gif", "{folder}", "game.xyz", ""])
def test_a_gif_that_cannot_be_written_is_refused_before_the_game(path, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    path = path.format(file=tmp_path / "file", folder=tmp_path)
    monkeypatch.setattr(sys, "argv", ["stag_hunt_env.py", "--gif", path, "--final-time", "1"])
    with pytest.raises(SystemExit) as stop:
        command_line(stag_hunt_env.parse_args, stag_hunt_env.main)
    printed = capsys.readouterr()
    (line,) = printed.err.strip().splitlines()
    assert stop.value.code == 2 and line.startswith("error: --gif") and not printed.out


@pytest.mark.parametrize("error", [ValueError, OSError, RuntimeError])
def test_a_mistake_keeps_its_traceback(error, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["program"])

    def main(args):
        raise error("not for users")

    with pytest.raises(error, match="not for users"):
        command_line(lambda words: None, main)


def test_ctrl_c_that_torch_turned_into_an_error_of_its_own(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["program"])

    def main(args):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise RuntimeError("an import failed") from error

    with pytest.raises(SystemExit) as stop:
        command_line(lambda words: None, main)
    assert stop.value.code == 130 and capsys.readouterr().err == "stopped\n"


@pytest.mark.parametrize("error, code", [(UserError, 2), (FloatingPointError, 1)])
def test_errors_of_a_program_end_with_one_line(error, code, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["program"])

    def main(args):
        raise error(f"not {args}")

    with pytest.raises(SystemExit) as stop:
        command_line(lambda words: "this", main)
    assert stop.value.code == code and capsys.readouterr().err == "error: not this\n"
    with pytest.raises(SystemExit) as stop:  # an exit of the program's own is left alone
        command_line(lambda words: 3, sys.exit)
    assert stop.value.code == 3 and capsys.readouterr().err == ""
    assert command_line(lambda words: words, lambda words: {"words": words}) == {"words": []}


def test_a_game_is_shown_and_written_to_a_gif(tmp_path):
    image = pytest.importorskip("PIL.Image")
    result = run_cli("--gif", tmp_path / "game.gif", "--seed", 3, "--num-players", 5, "--height", 5, "--final-time", 9)
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
    ent_coef: NonNegative = 0.0
    """weight of the entropy"""
    offset: Reward = -1.0
    """added to the reward"""
    eps: Whole = 0
    """annealed"""


@dataclasses.dataclass
class TestArgs(RunArgs, SeatFlags, PPOArgs):
    __test__ = False
    config: StagHuntConfig = dataclasses.field(default_factory=StagHuntConfig)


GROUPS = {"run": RunArgs, "game": StagHuntConfig, "seats": SeatFlags, "ppo": PPOArgs}
INF, NAN = math.inf, math.nan
RANGES = [  # field, what it must be, wrong, right
    ("num_envs", ">= 1", (0, -1, INF, NAN), (1, 10**15)),
    ("num_envs", "at most 1e+15", (10**15 + 1,), (5,)),
    ("learning_rate", "at most 1e+38", (1e39,), (5,)),
    ("gamma", "0 to 1", (-0.1, 1.1, INF, NAN), (0, 1, 0.5)),
    ("learning_rate", "> 0", (0, -1e-9, INF, NAN), (1e-30, 5)),
    ("horizon", ">= 1", (0, -3, NAN), (1, None)),
    ("ent_coef", ">= 0", (-1e-9, INF, NAN), (0, 3.5)),
    ("offset", "-1e6 to 1e6", (INF, -INF, NAN, 1e39), (-1e6, 0)),
    ("eps", ">= 0", (-1, INF, NAN), (0, 7)),
]


@pytest.mark.parametrize("name, text, wrong, right", RANGES)
def test_ranges(name, text, wrong, right):
    for value in right:
        check_ranges(TestArgs(**{name: value}))
    for value in wrong:
        refused(lambda value=value: check_ranges(TestArgs(**{name: value})), [f"must be {text}, not {value}"])
        refused(lambda value=value: check_ranges(TestArgs(**{name: value})), [f"--{name.replace('_', '-')} "])


def read(words, **defaults):
    return parse(TestArgs, GROUPS, TestArgs(**defaults), words.split())


def test_flags_are_flat_and_start_from_the_defaults_that_are_given():
    board = StagHuntConfig(height=5, num_stags=2)
    assert read("") == TestArgs() and read("", gamma=0.5, config=board) == TestArgs(gamma=0.5, config=board)
    args = read("--num-envs 3 --no-log --gamma=0.9 --width 7 --horizon 4 --seats learner,mixed", config=board)
    config = dataclasses.replace(board, width=7)
    expected = TestArgs(num_envs=3, log=False, gamma=0.9, config=config, horizon=4, seats="learner,mixed")
    assert args == expected and type(args) is TestArgs
    assert read("--log", log=False).log and read("--permute-ids").config.permute_ids
    assert read("--horizon None", horizon=3).horizon is None


def test_help_shows_groups_and_true_defaults(capsys):
    with pytest.raises(SystemExit) as stop:
        read("--help", gamma=0.25, config=StagHuntConfig(height=6))
    text = " ".join(capsys.readouterr().out.split())
    assert stop.value.code in (0, None)
    assert [text.index(f"{name} options") for name in GROUPS] == sorted(
        text.index(f"{name} options") for name in GROUPS
    )
    for part in ("discount (default: 0.25)", "rows of the board (default: 6)", "--log, --no-log", "--population STR"):
        assert part in text, part
    assert "ppo." not in text and "game." not in text


@pytest.mark.parametrize("words", ["--nonsense 3", "--num-envs three", "--num-envs", "--log 3", "--height 0", "3"])
def test_wrong_flags_are_refused(words, capsys):
    with pytest.raises(SystemExit) as stop:
        read(words)
    assert stop.value.code == 2


def test_early_flags():
    assert early_flags([], method="a", run_dir="b") == {"method": "a", "run_dir": "b"}
    words = ["--method=x", "--other", "3", "--run-dir", "y", "--flag"]
    assert early_flags(words, method="a", run_dir="b") == {"method": "x", "run_dir": "y"}
    assert early_flags(["--run_dir", "z", "--methods", "m", "--help"], method="a", run_dir="b") == {
        "method": "a",
        "run_dir": "z",
    }
    assert early_flags(["--method"], method="a") == {"method": "a"}  # left for `parse` to refuse


# ---------------------------------------------------------------------------------------------------------------------
# Programs as they start

AT_TORCH = """
import importlib.abc, os, runpy, sys
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch":
            {action}
sys.meta_path.insert(0, Finder())
sys.argv = [{path!r}]
sys.path.insert(0, os.path.dirname({path!r}))
runpy.run_path({path!r}, run_name="__main__")
"""
SCRIPTS = [path for where in ("*.py", "evaluation/*.py", "benchmarks/**/*.py") for path in sorted(ROOT.glob(where))]
PROGRAMS = [str(path.relative_to(ROOT)) for path in SCRIPTS if "__main__" in path.read_text()]


def start_until_torch(program, action, **environment):
    """Runs a program up to its `import torch`, in place of which comes `action`"""
    source = AT_TORCH.format(path=str(ROOT / program), action=action)
    environment = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, env=environment, check=False)


@pytest.mark.parametrize(("given", "threads"), [({}, "1"), ({"OMP_NUM_THREADS": "2"}, "2")])
def test_one_thread_unless_more_are_asked_for(given, threads):
    """Two that wait for each other are four times slower beside a busy program"""
    source = "import stag_hunt_env, torch; stag_hunt_env.command_line(list, lambda _: print(torch.get_num_threads()))"
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    environment |= {"PYTHONPATH": path, **given}
    found = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, env=environment, check=False)
    assert found.stdout.strip() == threads


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program_starts_by_command_line(program):
    assert "command_line(" in (ROOT / program).read_text().split("__main__")[1]


def test_a_copy_in_another_folder_asks_for_the_game_and_finds_it_by_its_path(tmp_path, monkeypatch):
    """As docs/editing.md says"""
    copy = tmp_path / "my_idea.py"
    copy.write_text((ROOT / "hopplus_ppo.py").read_text())
    monkeypatch.chdir(tmp_path)
    say = "print('found', flush=True); os._exit(0)"
    packages = os.pathsep.join(path for path in sys.path if path and Path(path) != ROOT)
    missing = start_until_torch(copy, say, PYTHONPATH=packages)
    assert missing.stderr.strip().endswith("ModuleNotFoundError: No module named 'stag_hunt_env'")
    assert start_until_torch(copy, say, PYTHONPATH=os.pathsep.join([str(ROOT), packages])).stdout == "found\n"


def test_ctrl_c_during_the_imports_ends_without_a_traceback():
    found = start_until_torch("hopplus_ppo.py", "raise KeyboardInterrupt")
    assert found.stderr == "stopped\n" and found.returncode in (130, -2)
    found = start_until_torch("hopplus_ppo.py", "raise ZeroDivisionError")
    assert "Traceback" in found.stderr and found.returncode == 1


def test_letters_that_the_output_does_not_know():
    source = "import stag_hunt_env; stag_hunt_env.command_line(list, lambda words: print('1 ± 2'))"
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": path}
    found = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, env=environment, check=False)
    assert found.returncode == 0 and found.stdout == "1 \\xb1 2\n"


def test_a_reader_that_stops_early_is_no_error():
    words = [sys.executable, str(ROOT / "hopplus_ppo.py"), "--help"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0
