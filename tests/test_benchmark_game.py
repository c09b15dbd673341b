"""benchmarks/game.py: the audit tells a fair game from an unfair one, and its test of equal means is exact."""

from benchmarks import game
from stag_hunt_env import StagHuntConfig, StagHuntEnv

import numpy as np
import pytest
import torch
from helpers import chi_square_p


def test_audit_passes_a_fair_game_and_fails_an_unfair_one(monkeypatch, capsys):
    args = game.Args(StagHuntConfig(final_time=15), audit=True, audit_games=500, device="cpu")
    assert game.main(args) == 0 and "no seat is favoured" in capsys.readouterr().out
    transition = StagHuntEnv.transition

    def unfair(env, state, actions):
        state, reward, *rest = transition(env, state, actions)
        return state, reward * torch.tensor([1, 1, 1, 1.5]), *rest

    monkeypatch.setattr(StagHuntEnv, "transition", unfair)
    assert game.main(args) == 1 and "A SEAT IS FAVOURED" in capsys.readouterr().out


@pytest.mark.parametrize("games, seats", [(500, 4), (6, 3)])
def test_equal_means_p(games, seats):
    """Uniform when all seats are equal, though seats of one game depend on each other; tiny when one is favoured."""
    rng = np.random.default_rng(3)
    draws = [rng.normal(size=(games, 1)) + rng.normal(size=(games, seats)) for _ in range(1000)]
    values = np.array([game.equal_means_p(returns) for returns in draws])
    assert chi_square_p(np.histogram(values, 10, (0, 1))[0]) > 1e-3
    assert (values < 0.05).mean() < 0.075, "the chi-square limit would be three to five times too sure of itself"
    if games == 500:
        assert game.equal_means_p(draws[0] + np.eye(seats)[1]) < 1e-6


def test_speed(capsys):
    assert game.main(game.Args(StagHuntConfig(), speed=True, batch_sizes=(8,), device="cpu")) == 0
    boards = [line.split(",")[0] for line in capsys.readouterr().out.splitlines()]
    assert boards == ["4x4", "8x8"]


def test_random_actions_are_legal_ones_as_often_as_each_other():
    env = StagHuntEnv(num_envs=1)
    legal = env.legal_actions(env.state)
    uniform = torch.rand(20_000, 4, generator=torch.Generator().manual_seed(1))
    env.state = type(env.state)(*(x.expand(20_000, *x.shape[1:]) for x in env.state))
    actions = game.random_actions(env, uniform)
    for seat in range(4):
        counts = torch.bincount(actions[:, seat], minlength=7)
        assert (counts > 0).tolist() == legal[0, seat].tolist()
        assert chi_square_p(counts[legal[0, seat]]) > 1e-3
