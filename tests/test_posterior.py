"""The exact posterior is that of plain Bayes, one game at a time."""

import itertools
from typing import NamedTuple

from evaluation.posterior import Posterior
from evaluation.strangers import SwitchingSeats
from stag_hunt_env import StagHuntConfig, StagHuntEnv, redraw_prob, sample

import pytest
import reference_game as reference
import torch
from helpers import games_of

CONFIG = StagHuntConfig(height=3, width=5, num_players=3, num_stags=2, num_hares=2, final_time=6)


class Step(NamedTuple):
    games: list  # plain-Python games before the step, and so are:
    posterior: torch.Tensor
    expected: torch.Tensor  # what the posterior expects of everybody
    probs: torch.Tensor
    table: torch.Tensor  # [B, N, P, 7] what each of the population would do
    actions: torch.Tensor
    present: torch.Tensor
    done: torch.Tensor


def make(tables, games, config=CONFIG, remember=True, unsteady=0.0, **options):
    torch.manual_seed(1)
    env = StagHuntEnv(config, games * len(tables), seed=1)
    seats = SwitchingSeats(env, tables, unsteady=unsteady, **options)
    return env, seats, Posterior(seats, remember, unsteady)


def play(env, seats, posterior, steps):
    """Learners play any action"""
    for _ in range(steps):
        games = games_of(env.state)
        learner_probs = torch.full((seats.num_learners, seats.num_envs, 7), 1 / 7)
        probs = seats.action_probs(env.state, learner_probs)
        before = posterior.probs()
        expected = posterior.action_probs(probs)
        table = seats.table[:, :, : len(seats.population)].clone()
        actions = sample(probs)
        _, present, done = env.advance(actions)
        posterior.update(actions, present, done)
        seats.update(done)
        yield Step(games, before, expected, probs, table, actions, present, done)


def slow_posterior(config, seen, population, redraw, remember, mixed):
    """[(game before the step, seat, action, acted, done)] of one seat -> posteriors before each step"""
    prior = [1 / len(population)] * len(population)
    posterior, found = prior, []
    for game, seat, action, acted, done in seen:
        found.append(posterior)
        if acted:
            likelihood = [reference.player_probs(config, game, seat, name)[action] for name in population]
            joint = [p * max(chance, 1e-9) for p, chance in zip(posterior, likelihood, strict=True)]
            posterior = [p / sum(joint) for p in joint]
        if done:
            forget = (redraw if mixed else 0.0) if remember else 1.0
            posterior = [(1 - forget) * p + forget * q for p, q in zip(posterior, prior, strict=True)]
    return found


BAYES = [("game", True, 0), ("game", False, 0), ("never", True, 1), (0.3, True, 0), (0.3, False, 0)]


@pytest.mark.parametrize("redraw, remember, walls", BAYES)
def test_posterior_is_that_of_plain_bayes(redraw, remember, walls):
    config = StagHuntConfig(4, 5, num_players=3, num_stags=2, num_hares=2, final_time=6, max_wall_pieces=walls)
    population = ("nearest_hare", "random", "last_stag", "first_stag")
    tables = [["mixed", "learner", "nearest_hare"], ["mixed", "mixed", "noisy_stag"]]
    steps = list(play(*make(tables, 4, config, remember, population=population, redraw=redraw), 20))
    for b, i in itertools.product(range(8), range(3)):
        name = tables[b // 4][i]
        if name == "learner":
            assert all((step.posterior[b, i] == 0.25).all() for step in steps)
            assert all(torch.equal(step.expected[b, i], step.probs[b, i]) for step in steps)
            continue
        seen = [
            (step.games[b], i, int(step.actions[b, i]), bool(step.present[b, i]), bool(step.done[b])) for step in steps
        ]
        expected = slow_posterior(config, seen, population, redraw_prob(redraw), remember, name == "mixed")
        for step, posterior in zip(steps, expected, strict=True):
            assert step.posterior[b, i].tolist() == pytest.approx(posterior, abs=1e-5)
            table = [reference.player_probs(config, step.games[b], i, player) for player in population]
            mixture = (torch.tensor(posterior)[:, None] * torch.tensor(table)).sum(0)
            torch.testing.assert_close(step.expected[b, i], mixture, atol=1e-5, rtol=0)
    assert sum(int(step.done.sum()) for step in steps) >= 24


@pytest.mark.parametrize("redraw", ["never", 0.3])
def test_the_posterior_also_infers_whether_a_player_is_steady(redraw):
    """Of one that is not, the next game is with another; of a steady one as --redraw says"""
    share = 0.25
    env, seats, posterior = make([["learner", "mixed", "mixed"]], 20, redraw=redraw, unsteady=share)
    happened = list(play(env, seats, posterior, 40))
    count = len(seats.population)
    forget = torch.tensor([[redraw_prob(redraw)], [1.0]], dtype=torch.float64)
    for place, seat in itertools.product(range(20), (1, 2)):
        joint = torch.tensor([[1 - share], [share]], dtype=torch.float64).expand(2, count) / count  # steady or not
        for step in happened:
            if step.present[place, seat]:
                joint = joint * step.table[place, seat, :, step.actions[place, seat]].double().clamp(min=1e-9)
                joint = joint / joint.sum()
            if step.done[place]:
                joint = (1 - forget) * joint + forget * joint.mean(1, keepdim=True)
        expected = joint.sum(0).float()
        torch.testing.assert_close(posterior.probs()[place, seat], expected, atol=1e-4, rtol=1e-3)
