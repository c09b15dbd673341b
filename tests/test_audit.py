"""benchmarks/audit.py: it tells a fair game from an unfair one, and its test of equal means is exact."""

from benchmarks import audit
from stag_hunt_env import StagHuntConfig, StagHuntEnv

import numpy as np
import pytest
import torch
from helpers import chi_square_p


def test_audit_passes_a_fair_game_and_fails_an_unfair_one(monkeypatch, capsys):
    args = audit.Args(StagHuntConfig(final_time=15), games=500, device="cpu")
    assert audit.main(args) == 0 and "no seat is favoured" in capsys.readouterr().out
    transition = StagHuntEnv.transition

    def unfair(env, state, actions):
        state, reward, *rest = transition(env, state, actions)
        return state, reward * torch.tensor([1, 1, 1, 1.5]), *rest

    monkeypatch.setattr(StagHuntEnv, "transition", unfair)
    assert audit.main(args) == 1 and "A SEAT IS FAVOURED" in capsys.readouterr().out


@pytest.mark.parametrize("games, seats", [(500, 4), (6, 3)])
def test_equal_means_p(games, seats):
    """Uniform when all seats are equal, though seats of one game depend on each other; tiny when one is favoured."""
    rng = np.random.default_rng(3)
    draws = [rng.normal(size=(games, 1)) + rng.normal(size=(games, seats)) for _ in range(1000)]
    values = np.array([audit.equal_means_p(returns) for returns in draws])
    assert chi_square_p(np.histogram(values, 10, (0, 1))[0]) > 1e-3
    assert (values < 0.05).mean() < 0.075, "the chi-square limit would be three to five times too sure of itself"
    if games == 500:
        assert audit.equal_means_p(draws[0] + np.eye(seats)[1]) < 1e-6
