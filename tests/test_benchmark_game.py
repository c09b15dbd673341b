"""benchmarks/game.py: the audit tells a fair game from an unfair one, and its test of equal means is exact."""

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import chi_square_p

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from stag_hunt_env import StagHuntEnv  # noqa: E402

import game  # noqa: E402


def test_audit_passes_a_fair_game_and_fails_an_unfair_one(monkeypatch, capsys):
    fair = game.main(game.Args(audit=True, audit_games=200, device="cpu"))["audit"]
    assert not fair["favoured"] and [row["players"] for row in fair["table"]] == [*game.AUDITED] * 2
    transition = StagHuntEnv.transition

    def unfair(env, state, actions):
        state, reward, *rest = transition(env, state, actions)
        return state, reward * torch.tensor([1, 1, 1, 1.5]), *rest

    monkeypatch.setattr(StagHuntEnv, "transition", unfair)
    script = str(BENCHMARKS / "game.py")
    flags = "--audit --audit-games 500 --final-time 15 --device cpu"
    monkeypatch.setattr(sys, "argv", [script, *flags.split()])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(script, run_name="__main__")
    assert stopped.value.code == 1 and "A SEAT IS FAVOURED" in capsys.readouterr().out


@pytest.mark.parametrize("games, seats", [(500, 2), (500, 4), (10, 4), (6, 3)])
def test_equal_means_p(games, seats):
    """Uniform when all seats are equal, though seats of one game depend on each other; tiny when one is favoured."""
    rng = np.random.default_rng(3)
    draws = [rng.normal(size=(games, 1)) + rng.normal(size=(games, seats)) for _ in range(1000)]
    values = np.array([game.equal_means_p(returns) for returns in draws])
    assert chi_square_p(np.histogram(values, 10, (0, 1))[0]) > 1e-3
    assert (values < 0.05).mean() < 0.075, "the chi-square limit would be three to five times too sure of itself"
    if games == 500:
        assert game.equal_means_p(draws[0] + np.eye(seats)[1]) < 1e-6
    assert game.equal_means_p(np.ones((100, seats))) == 1.0
    assert game.equal_means_p(np.ones((100, seats)) * np.arange(seats)) == 0.0


def test_speed(capsys):
    table = game.main(game.Args(speed=True, batch_sizes=(8, 200_000), sides=(4, 5), device="cpu"))["speed"]["table"]
    assert [(row["board"], row["games"]) for row in table] == [("4x4", 8), ("5x5", 8)]
    assert all(row["env_steps_per_second"] > 0 for row in table)
