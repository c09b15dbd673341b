"""What the program refuses, and what it does from the command line."""

import doctest
import os
import subprocess
import sys
from pathlib import Path

import gymnasium
import pytest
import torch
from helpers import chi_square_p, seeded

import stag_hunt_env
from stag_hunt_env import StagHuntConfig, StagHuntEnv, StagHuntGymEnv, StagHuntParallelEnv, check_seats, equal_means_p

ROOT = Path(stag_hunt_env.__file__).resolve().parent
no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


def actions(shape=(3, 4), fill=4, dtype=torch.int64):
    return torch.full(shape, fill, dtype=dtype)


BAD_CONFIGS = [  # fields, and what the error must name
    ({"height": 2, "width": 2}, ["9", "4"]),
    ({"height": 3, "width": 3, "num_players": 8, "num_hares": 1}, ["10", "9"]),
    ({"height": 0}, ["0x4"]),
    ({"num_players": 1}, ["1"]),
    ({"num_players": 9}, ["9"]),
    ({"num_stags": -1}, ["-1"]),
    ({"num_hares": -2}, ["-2"]),
    ({"final_time": 0}, ["0"]),
    ({"strengths": (1, 2, 3)}, ["4", "(1, 2, 3)"]),
    ({"strengths": (1, 2, 3, 0)}, ["(1, 2, 3, 0)"]),
    ({"strengths": (1, 2, 3, float("nan"))}, ["nan"]),
    ({"strengths": (1, 2, 3, float("inf"))}, ["inf"]),
    ({"stag_reward": float("nan")}, ["nan"]),
    ({"max_wall_pieces": -1}, ["-1"]),
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
    (lambda env: check_seats(["random"] * 3, 4), ["3", "4"]),
    (lambda env: check_seats(["random", "randon"], 2), ["randon", "nearest_stag"]),
    (lambda env: StagHuntGymEnv(seats=("random",) * 4), ["1", "0"]),
    (lambda env: StagHuntGymEnv(seats=("learner", "learner", "random", "random")), ["1", "2"]),
    (lambda env: StagHuntGymEnv(seats=("learner", "random")), ["2", "4"]),
    (lambda env: StagHuntGymEnv(seats=("learner", "random", "random", "somebody")), ["somebody"]),
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
def test_wrappers_refuse_actions_out_of_range(bad):
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
    for ours, expected in zip(env.transition(env.state, acts.to(dtype))[1:], env.transition(env.state, acts)[1:], strict=True):
        assert torch.equal(ours, expected)


def run_cli(*arguments):
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "stag_hunt_env.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)


BAD_COMMANDS = [
    (["--num-players", 9], ["9"]),
    (["--height", 2, "--width", 2], ["9", "4"]),
    (["--seats", "random,random"], ["2", "4"]),
    (["--seats", "a,b,c,d"], ["'a'", "random"]),
    (["--benchmark", "--boards", "4by4"], ["4by4"]),
    (["--nonsense"], ["--nonsense"]),
    (["--benchmark", "--device", "cpu", "--batch-sizes", 200000], ["200000"]),
    (["--height", "four"], ["--height", "four"]),
    (["--fps", 0], ["0"]),
    (["--gif", "nowhere/game.gif"], ["nowhere"]),
    (["--audit", "--audit-games", 1], ["100", "1"]),
    pytest.param(["--audit", "--device", "cuda"], ["cuda"], marks=no_cuda),
]


@pytest.mark.parametrize("arguments, words", BAD_COMMANDS)
def test_bad_commands_end_with_one_line_and_code_2(arguments, words):
    result = run_cli(*arguments)
    assert result.returncode == 2, result
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1 and all(word in lines[0] for word in words), result.stderr


def test_play_does_not_mind_the_boards_of_the_benchmark():
    result = run_cli("--play", "--height", 6, "--num-players", 8, "--num-hares", 10, "--seats", ",".join(["nearest_hare"] * 8))
    assert result.returncode == 0, result.stderr


def test_play_writes_a_gif(tmp_path):
    image = pytest.importorskip("PIL.Image")
    result = run_cli("--play", "--gif", tmp_path / "game.gif", "--seed", 3)
    assert result.returncode == 0, result.stderr
    assert "t=0/35" in result.stdout and "S" in result.stdout
    with image.open(tmp_path / "game.gif") as gif:
        assert gif.n_frames > 1


def test_audit_passes_a_fair_game_and_fails_an_unfair_one():
    fair = run_cli("--audit", "--audit-games", 2000)
    assert fair.returncode == 0, fair.stdout + fair.stderr
    unfair = run_cli("--audit", "--audit-games", 1000, "--final-time", 15, "--strengths", 1, 1, 1, 9)
    assert unfair.returncode == 1, unfair.stdout + unfair.stderr


@pytest.mark.parametrize("seats", [2, 4])
def test_equal_means_p(seats):
    """Uniform when all seats are equal, though seats of one game depend on each other; tiny when one is favoured."""
    generator, values = seeded(3), []
    for _ in range(400):
        shared = torch.rand(500, 1, generator=generator, dtype=torch.float64)
        own = torch.rand(500, seats, generator=generator, dtype=torch.float64)
        values.append(equal_means_p(shared + own - own.mean(1, keepdim=True) * 0.5))
    assert chi_square_p(torch.histc(torch.tensor(values), 10, 0, 1)) > 1e-3
    own[:, 1] += 0.2
    assert equal_means_p(own) < 1e-6
    assert equal_means_p(torch.ones(100, seats, dtype=torch.float64)) == 1.0


@pytest.mark.parametrize(("games", "seats"), [(10, 4), (6, 3)])
def test_equal_means_p_of_few_games(games, seats):
    generator = seeded(5)
    values = []
    for _ in range(1000):
        shared = torch.randn(games, 1, generator=generator, dtype=torch.float64)
        values.append(equal_means_p(shared + torch.randn(games, seats, generator=generator, dtype=torch.float64)))
    values = torch.tensor(values)
    assert chi_square_p(torch.histc(values, 10, 0, 1)) > 1e-3
    assert (values < 0.05).float().mean() < 0.075, "the chi-square limit is three to five times too sure of itself"


def test_the_examples_in_the_manual():
    result = doctest.testmod(stag_hunt_env)
    assert result.attempted > 0 and result.failed == 0
