"""hopplus_ppo.py: imagined games, PPO on real and imagined steps, and what is logged about them"""

import copy
import dataclasses
import itertools
import math
from unittest import mock

import hopplus_mcts
import hopplus_ppo as hop
from stag_hunt_env import STAY, State, seats_table

import numpy as np
import pytest
import torch
from helpers import (
    TINY_CONFIG,
    seeded,
)
from tiny_hopplus import (
    CPU,
    co_players_there,
    enlarge_moa,
    infer,
    make_args,
    make_state,
    on_board,
    one_step,
    play,
    read_inputs,
    recorded,
    train,
    views,
)
from torch import nn

# ---------------------------------------------------------------------------------------------------------------------
# Imagination


class TrueWorld:
    """The rules in the place of the world model, and a list of what it was given and said. `change` makes something
    else of (board, reward) in call number `len(said)`."""

    def __init__(self, env, change=lambda board, reward, call: (board, reward)):
        self.env, self.change, self.said, self.joints = env, change, [], []

    def __call__(self, board, walls, joint, next_board=None, reward=None, method="predict"):
        config = self.env.config
        n, gone = config.num_players, config.num_cells
        cells = board.flatten(0, 1).int()
        players, prey = cells.split([n, config.num_prey], 1)
        clock = torch.zeros(len(cells), dtype=torch.int32)
        before = State(
            position=players.clamp(max=gone - 1),
            present=on_board(config, players),
            prey_position=prey.clamp(max=gone - 1),
            prey_alive=on_board(config, prey),
            walls=walls.flatten(0, 1).expand(-1, gone),
            time=clock,
            first_hunt=clock - 1,
        )
        after, paid, _, _ = self.env.transition(before, joint.flatten(0, 1).long())
        new, paid = self.env.cells(after)[:, 0].view_as(board), paid[:, 0].view(board.shape[:2])
        if method == "loss":
            return (new != next_board).any(2) + (paid - reward).abs() > 1e-6
        new, paid = self.change(new.clone(), paid, len(self.said))
        self.said.append(new)
        self.joints.append(joint)
        return new, paid


def wrong(board):
    """Cells that are on the board, but another one for everybody"""
    return (board + 1) % TINY_CONFIG.num_cells


def test_what_the_world_model_learns_is_true():
    """Boards and actions in the same order, rewards of the same step; without the learner nothing is learned."""
    state, seen = make_state(num_envs=16, offline_ratio=0.0), []
    state.games.replay.push(play(state, 14)[0])
    with pytest.MonkeyPatch.context() as patch:
        world, draw = TrueWorld(state.games.env), hop.sample_replays

        def draw_and_tell(*given, **named):
            batch = draw(*given, **named)
            seen.append(batch)
            return batch

        patch.setattr(hop, "sample_replays", draw_and_tell)
        patch.setattr(hop, "optimizer_step", lambda optimizer, loss, max_norm: loss)
        networks = state.networks._replace(world=world)
        losses = hop.train_world_model(state.args, networks, None, state.games.replay, None, 5)
    assert (losses["losses/world_model"] == 0).all() and (seen[0].reward != 0).any() and (seen[0].joint >= 5).any()
    mask = hop.learner_mask(TINY_CONFIG, seen[0].board)
    assert torch.equal(mask, on_board(TINY_CONFIG, seen[0].board[..., 0])) and 0 < mask.float().mean() < 1


def test_world_model_ignores_steps_without_the_learner(monkeypatch):
    state, found = make_state(num_envs=16, offline_ratio=0.0), []
    w = play(state, 14)[0]
    mask = hop.learner_mask(TINY_CONFIG, w.board)
    for reward in (w.reward, torch.where(mask, w.reward, 10.0)):
        replay = hop.Replay(1, CPU)
        replay.push(w._replace(reward=reward))
        monkeypatch.setattr(hop, "optimizer_step", lambda optimizer, loss, max_norm: loss)
        torch.manual_seed(1)
        losses = hop.train_world_model(state.args, state.networks, None, replay, None, 3)
        found.append(losses["losses/world_model"])
    assert torch.equal(*found) and not mask.all()


def starts(state, count=60, rollouts=2):
    """States to imagine from [M, n, ...]; how many earlier games are remembered, in the history, numbers them"""
    for _ in range(rollouts):
        state.games.replay.push(play(state, state.args.num_steps)[0])
    windows = state.games.replay.sample(-(-count // state.args.num_steps), window=1)
    start = hop.replayed_states(state.args, state.games.env, state.networks, windows)
    start.history[..., state.args.subgoal_hidden] = torch.arange(start.done.shape[1])[:, None]
    return start


def where_present(config, start):
    """Index of as many states of each learner, where it is on the board"""
    present = hop.learner_mask(config, start.board)
    rows = present.byte().argsort(dim=1, descending=True, stable=True)
    return torch.arange(len(rows))[:, None], rows[:, : int(present.sum(1).min())]


def in_turn(start):
    """A patch: row i always begins with start i. All learners must be there."""
    rand, size = torch.rand, start.done.shape
    each = ((torch.arange(size[1]) + 0.5) / size[1]).expand(size)
    return mock.patch.object(torch, "rand", lambda *given, **named: each if given == size else rand(*given, **named))


def imagined(state, start, world=None, horizon=99, rows=None):
    networks = state.networks if world is None else state.networks._replace(world=world)
    horizon = torch.as_tensor(horizon).expand(len(state.horizon))
    dream = hop.imagine(state.args, state.games.env, networks, start, rows or start.done.shape[1], horizon)
    return dream | read_inputs(state.args.config, dream["inputs"])


@pytest.mark.parametrize("limit", [None, 1])
def test_imagined_games_follow_the_rules_and_begin_anew_when_they_are_over(limit, monkeypatch):
    """Each where another real one was, of the same learner, on the board; where the horizon cuts them one step later,
    as they are worth what the critic says of the state there"""
    config = dataclasses.replace(TINY_CONFIG, steps_after_first_hunt=limit)
    state = make_state(config=config, num_envs=12, imagination_horizon=10)
    start = starts(state)
    horizon, world, situations, perceive = torch.tensor([99, 99, 2]), TrueWorld(state.games.env), [], hop.perceive
    monkeypatch.setattr(hop, "perceive", lambda *given: (situations.append(given[4:]), perceive(*given))[1])
    dream = imagined(state, start, world, horizon, rows=300)
    begins, drawn, ends = torch.ones(3, 300, dtype=torch.bool), torch.zeros(start.done.shape), {}
    time = first = age = torch.zeros(3, 300, dtype=torch.int32)
    for k in range(10):
        board, walls, clock, last_joint, history = situations[k]
        number = history[:, :, 0, state.args.subgoal_hidden].long()
        own = hop.Transitions(*(x[torch.arange(3)[:, None], number] for x in start))
        drawn += torch.nn.functional.one_hot(number, drawn.shape[1]).mul(begins[..., None]).sum(1)
        time, age = torch.where(begins, own.time.int(), time + 1), torch.where(begins, 0, age + 1)
        first = torch.where(begins, own.first_hunt.int(), first)
        for found, expected in ((walls, own.walls), (history, own.history)):
            assert torch.equal(found[begins], expected[begins])
        before = begins[..., None]
        assert torch.equal(board, torch.where(before, own.board, world.said[k - 1] if k else own.board))
        assert torch.equal(last_joint, torch.where(before, own.last_joint, world.joints[k - 1] if k else 0))
        assert torch.equal(dream["board"][:, k], board)
        torch.testing.assert_close(clock, time / 6)
        _, _, legal = views(state, own._replace(board=board))
        joint, after = world.joints[k], world.said[k]
        assert torch.equal(dream["legal"][:, k], legal[:, :, 0]) and legal.gather(3, joint[..., None]).all()
        assert torch.equal(dream["action"][:, k], joint[..., 0])
        caught = (after[:, :, 3:] != board[:, :, 3:]).any(2)
        first = torch.where(caught & (first < 0), time + 1, first)
        over = {"clock": time + 1 >= 6, "left": after[:, :, 0] == TINY_CONFIG.num_cells}
        over["limit"] = (first >= 0) & (time + 1 - first >= limit) if limit else torch.zeros_like(begins)
        assert torch.equal(dream["ended"][:, k], over["clock"] | over["left"] | over["limit"])
        over["cut"] = age == horizon[:, None]
        assert torch.equal(dream["mask"][:, k], ~over["cut"])
        begins = torch.stack([*over.values()]).any(0)
        ends = {name: ends.get(name, False) | bool(x.any()) for name, x in over.items()}
    assert ends == {"clock": True, "left": True, "limit": bool(limit), "cut": True}
    present = hop.learner_mask(config, start.board)
    assert torch.equal(drawn > 0, present) and not present.all(), "every state, but where the learner has left"


def test_where_a_learner_is_nowhere_it_imagines_nothing():
    state = make_state(num_envs=12)
    start = starts(state)
    start.board[1, ..., 0] = TINY_CONFIG.num_cells
    assert imagined(state, start)["mask"].flatten(1).float().mean(1).tolist() == [1, 0, 1]


@pytest.mark.parametrize("goal_kind", ["continuous", "discrete"])
def test_imagined_subgoals_are_inferred_as_real_ones_are(goal_kind):
    state = make_state(goal_kind=goal_kind, num_envs=8)
    w, out, _ = play(state, 8)
    place = where_present(TINY_CONFIG, one_step(w, 3))
    real = hop.Transitions(*(x[place] for x in one_step(w, 3)))
    with in_turn(real):
        dream = imagined(state, real)
    for name in ("goals", "value"):
        torch.testing.assert_close(dream[name][:, 0], out[name][:, 3][place], atol=1e-2, rtol=1e-2)  # half precision
    assert (dream["goals"] != 0).any(3).all()
    history, never = real.history.float(), torch.zeros_like(real.done)
    for k in range(4):
        board, clock, last = dream["board"][:, k], dream["clock"][:, k], dream["last_joint"][:, k]
        belief = infer(state, real._replace(board=board), history)
        torch.testing.assert_close(dream["goals"][:, k], belief.goals)
        with torch.no_grad():
            seen = views(state, real._replace(board=board))
            *_, log_probs, value = hop.evaluate_policy(
                state.args, state.networks.policy, seen, clock, last, belief.goals
            )
            if k < 3:
                joint = dream["last_joint"][:, k + 1]
                given = state.args, state.games.env, state.networks, belief, joint, history, never
                begins_anew = dream["ended"][:, k, :, None, None]
                history = torch.where(begins_anew, real.history.float(), hop.update_history(*given))
        torch.testing.assert_close(dream["value"][:, k], value)
        own = log_probs.gather(2, dream["action"][:, k][..., None])[..., 0]
        torch.testing.assert_close(dream["log_prob"][:, k], own)
    assert dream["ended"][:, :3].any() and not dream["ended"][:, :3].all()


def test_imagined_co_players_are_drawn_from_moa():
    """Each with a subgoal of its own, drawn from what q_phi says"""
    state = make_state(num_envs=8)
    enlarge_moa(state, 1000.0)
    state.networks.inference.params["head.2.bias"].data[..., state.args.goal_dim :] = 3.0  # it is far from certain
    start = starts(state, 8)
    everybody = on_board(TINY_CONFIG, start.board[:, :, :3]).all(2)  # [M, n]
    first = everybody.byte().argmax(1, keepdim=True).expand(-1, 4000)
    many = hop.Transitions(*(x[torch.arange(3)[:, None], first] for x in start))
    belief = infer(state, many, many.history.float())
    torch.manual_seed(1)
    noise = hop.goal_noise(state.args, 3, 8000, device=CPU)
    with torch.no_grad():
        given = state.args, state.networks, belief, many.time / 6
        drawn, mean = (hop.predict_actions(*given, x).exp() for x in (noise, torch.zeros_like(noise)))
    expected = drawn.mean(1)  # [M, K, 7]
    assert ((expected - mean[:, 0]).abs().amax((1, 2)) > 0.1).all(), "which subgoal it is matters"
    world = TrueWorld(state.games.env)
    imagined(state, many, world)
    found = torch.nn.functional.one_hot(world.joints[0][..., 1:], 7).float()
    torch.testing.assert_close(found.mean(1), expected, atol=0.03, rtol=0)
    both = torch.einsum("mna,mnb->mab", found[:, :, 0], found[:, :, 1]) / 4000
    independent = expected[:, 0, :, None] * expected[:, 1, None]
    torch.testing.assert_close(both, independent, atol=0.03, rtol=0)


def test_imagined_actions_of_the_learner_are_drawn_from_its_policy():
    """Not its likeliest ones: each as often as the policy says"""
    state = make_state(num_envs=8)
    start = starts(state, 8)
    learner, rows = where_present(TINY_CONFIG, start)
    first = hop.Transitions(*(x[learner, rows[:, :1]] for x in start))
    dream = imagined(state, first, rows=2000)
    action, prob = dream["action"][:, 0], dream["log_prob"][:, 0].exp()
    frequency = torch.nn.functional.one_hot(action, 7).float().mean(1)
    torch.testing.assert_close(frequency.gather(1, action), prob, atol=0.05, rtol=0)
    assert ((frequency > 0).sum(1) > 1).all()


@pytest.mark.parametrize("share", [0.0, 0.5, 0.75, 1.0])
def test_a_share_of_the_imagined_games_starts_from_rule_based_ones(share, monkeypatch):
    """With its co-players' histories, so that their subgoals are inferred"""
    state, seen, imagine = make_state(watched_starts=share, num_envs=16, imagination_horizon=4), [], hop.imagine
    rule_based = play(state, state.args.num_steps)[0]
    marked = rule_based._replace(time=rule_based.time + 100, history=torch.full_like(rule_based.history, 3.0))
    state.watched.replay.push(marked)
    monkeypatch.setattr(hop, "imagine", lambda *given: (seen.append(given[3]), imagine(*given))[1])
    train(state)
    marks = seen[0].time >= 100
    assert marks.float().mean(1).tolist() == pytest.approx([share] * 3, abs=0.1)
    windows = marks.shape[1] // state.args.num_steps
    first_steps, own = seen[0].history[:, :windows], marks[:, :windows]
    assert (first_steps[own] == 3).all() and not (first_steps[~own] == 3).flatten(1).all(1).any()


def test_without_watched_games_imagination_starts_from_the_learners_own():
    state = make_state(watched_starts=0.5, offline_ratio=0.0)
    assert state.watched is None
    assert train(state)["imagined"]["weight"].sum() > 0


def test_imagination_stops_at_the_horizon_and_bootstraps():
    state = make_state(gamma=0.5, num_envs=12)
    start = starts(state)
    world = TrueWorld(state.games.env)
    dream = imagined(state, start, world, horizon=[0, 2, 99])
    mask = dream["mask"]
    assert not mask[0].any() and mask[1, :2].all() and mask[2].all()
    went_on = ~dream["ended"][1, 0]
    cut = went_on & ~dream["ended"][1, 1]
    assert torch.equal(mask[1, 2], ~cut) and torch.equal(dream["board"][1, 2][cut], world.said[1][1][cut])
    batch = hop.make_ppo_batch(state.args, dream, real=False)
    assert torch.equal(batch["weight"] > 0, mask.flatten(1, 2))
    returns = batch["returns"].unflatten(1, (4, -1))[1, 1]
    torch.testing.assert_close(returns[cut], (dream["reward"][1, 1] + 0.5 * dream["value"][1, 2])[cut])
    ended = dream["ended"][1, 1]
    torch.testing.assert_close(returns[ended], dream["reward"][1, 1][ended])
    assert cut.any() and ended.any() and mask[1, 3][cut].all(), "one step later it has begun anew"


def test_the_horizon_is_measured_by_boards_and_payoffs():
    state = make_state(num_envs=32, trust_exact_match=0.9)
    state.games.env.state.time[::4] = 4  # a quarter of the games end on the way
    w = play(state, 8)[0]

    def measured(change=lambda board, reward, call: (board, reward), **changes):
        world = TrueWorld(state.games.env, change)
        args = dataclasses.replace(state.args, **changes)
        horizon, metrics = hop.measure_horizon(args, state.networks._replace(world=world), w)
        return horizon.tolist(), {name.removeprefix("wm/"): x.tolist() for name, x in metrics.items()}

    def wrong_in_the_third_step(board, reward, call):
        return {2: wrong(board), 3: w.next_board[:, 3]}.get(call, board), reward  # what was wrong once counts as wrong

    def without_prey(board, reward, call):
        board[:, :, 3:] = TINY_CONFIG.num_cells
        return board, reward

    def half_wrong(board, reward, call):
        board[:, ::2] = wrong(board[:, ::2])
        return board, reward

    def wrong_where_games_end(board, reward, call):
        board[:, ::4] = wrong(board[:, ::4])
        return board, reward

    horizon, metrics = measured()
    assert horizon == [4, 4, 4] and metrics["horizon"] == horizon
    for k in range(1, 5):
        assert metrics[f"exact_match/{k}"] == metrics[f"payoff_match/{k}"] == [1, 1, 1]
    assert metrics["unknown_reward"] == [0, 0, 0]
    horizon, metrics = measured(wrong_in_the_third_step)
    assert horizon == [2, 2, 2] and metrics["exact_match/2"] == [1, 1, 1] and metrics["exact_match/3"] == [0, 0, 0]
    assert metrics["payoff_match/3"] == [1, 1, 1] and metrics["exact_match/4"] == [0, 0, 0]
    horizon, metrics = measured(without_prey)  # from its own boards on, where nobody earns anything
    earned = w.reward[:, :4] != 0
    counts = hop.learner_mask(TINY_CONFIG, w.board[:, :4]) & (w.done[:, :4].cumsum(1) - w.done[:, :4].int() == 0)
    right = (~earned | (torch.arange(4) == 0)[:, None]).int().cumprod(1)
    shares = (right * counts).sum(2) / counts.sum(2)  # [M, 4]
    for k in range(4):
        assert metrics[f"payoff_match/{k + 1}"] == pytest.approx(shares[:, k].tolist()), k
    assert horizon == [0, 0, 0] and (shares[:, 0] == 1).all() and (shares[:, 3] < 1).any()
    horizon, metrics = measured(half_wrong)
    there = hop.learner_mask(TINY_CONFIG, w.board[:, 0])
    expected = there[:, 1::2].sum(1) / there.sum(1)
    assert horizon == [0, 0, 0] and metrics["exact_match/1"] == pytest.approx(expected.tolist())
    horizon, metrics = measured(lambda board, reward, call: (board, reward + 5))
    assert horizon == [0, 0, 0] and metrics["exact_match/4"] == [1, 1, 1] and metrics["payoff_match/1"] == [0, 0, 0]
    assert measured(half_wrong, trust_exact_match=0.0)[0] == [4, 4, 4]
    horizon, metrics = measured(wrong_where_games_end)
    assert max(metrics["exact_match/1"]) < 0.9 and metrics["exact_match/4"] == [1, 1, 1]
    assert horizon == [0, 0, 0], "who is right later was not trusted before"


def test_the_horizon_is_measured_before_the_world_model_learns_from_the_same_steps():
    found = []
    for updates in (0, 8):
        state = make_state(wm_updates=updates, wm_learning_rate=0.05, trust_exact_match=0.5)
        hop.watch_rule_based(state)
        train(state)
        found.append({name: x.tolist() for name, x in state.metrics.read().items() if name.startswith("wm/")})
    assert found[0] == found[1] and "wm/exact_match/1" in found[0]


def test_the_horizon_is_measured_on_games_of_all_places():
    """Of more than 1024 not the first ones: with shared parameters, those are of the first seats"""
    state = make_state()
    w, _, _ = play(state, 1)
    many = hop.Transitions(*(x.repeat_interleave(512, 2) for x in w))  # 2048 games
    many.next_board[:, :, 1024:] = wrong(many.next_board[:, :, 1024:])
    networks = state.networks._replace(world=TrueWorld(state.games.env))
    _, metrics = hop.measure_horizon(state.args, networks, many)
    assert metrics["wm/exact_match/1"].tolist() == [0.5] * 3


def test_each_learner_imagines_as_far_as_its_own_world_model_is_good(monkeypatch):
    state, measure = make_state(num_envs=16, offline_ratio=0.0), hop.measure_horizon
    horizons = torch.tensor([0, 2, 4])
    monkeypatch.setattr(hop, "measure_horizon", lambda *given: (horizons, measure(*given)[1]))
    counts = train(state)["imagined"]["weight"].unflatten(1, (4, -1)) > 0  # [M, h, n]
    assert not counts[0].any() and counts[2].all()
    share = counts.flatten(1).float().mean(1)
    assert 0.7 < share[1] < 1
    torch.testing.assert_close(torch.tensor(state.metrics.read()["imagined/share"]), share)


def test_a_bonus_in_shape_reward_reaches_real_and_imagined_steps(monkeypatch):
    state = make_state(num_envs=12)
    start = starts(state)
    w, out, _ = play(state, 8)

    def rewards():
        torch.manual_seed(1)
        world = TrueWorld(state.games.env)
        dream = imagined(state, start, world)
        next_board = torch.stack(world.said, 1)
        return hop.real_samples(state.args, TINY_CONFIG, w, out)["reward"], dream["reward"], dream, next_board

    plain = rewards()

    def bonus(args, config, reward, board, joint, next_board):
        return reward + 0.25 * (joint[..., 0] == STAY) + (board[..., 0] == 0) + 9.0 * (next_board[..., 1] == 2)

    monkeypatch.setattr(hop, "shape_reward", bonus)
    shaped = rewards()
    _, _, dream, next_board = plain
    extra = 0.25 * (w.joint[..., 0] == STAY) + (w.board[..., 0] == 0) + 9.0 * (w.next_board[..., 1] == 2)
    torch.testing.assert_close(shaped[0], plain[0] + extra)
    extra = 0.25 * (dream["action"] == STAY) + (dream["board"][..., 0] == 0) + 9.0 * (next_board[..., 1] == 2)
    torch.testing.assert_close(shaped[1], plain[1] + extra)
    assert torch.equal(w.reward, plain[0]), "the world model learns the game's own reward"


# ---------------------------------------------------------------------------------------------------------------------
# PPO


@pytest.mark.parametrize("gae_lambda", [0.8, 1.0])
def test_advantages_against_plain_python(gae_lambda):
    args, generator = make_args(gamma=0.9, gae_lambda=gae_lambda), np.random.default_rng(1)
    m, steps, games = 2, 12, 8
    reward, value = generator.normal(size=(m, steps, games)), generator.normal(size=(m, steps + 1, games))
    ended, mask = generator.random((m, steps, games)) < 0.15, generator.random((m, steps, games)) < 0.85
    given = (torch.tensor(reward).float(), torch.tensor(value).float(), torch.tensor(ended), torch.tensor(mask))
    ours = hop.compute_gae(args, *given)
    cuts = 0
    for i, t, g in np.ndindex(m, steps, games):
        expected, monte_carlo, factor = 0.0, 0.0, 1.0
        for u in range(t, steps if mask[i, t, g] else t):
            ahead = 0.0 if ended[i, u, g] else value[i, u + 1, g]
            expected += (gae_lambda * 0.9) ** (u - t) * (reward[i, u, g] + 0.9 * ahead - value[i, u, g])
            monte_carlo += factor * reward[i, u, g]
            factor *= 0.9
            last = u == steps - 1 or not mask[i, u + 1, g]
            if ended[i, u, g] or last:
                cuts += last and not ended[i, u, g]
                monte_carlo += factor * ahead
                break
        assert float(ours[i, t, g]) == pytest.approx(expected, abs=1e-5)
        if gae_lambda == 1 and mask[i, t, g]:
            assert float(ours[i, t, g]) + value[i, t, g] == pytest.approx(monte_carlo, abs=1e-5)
    assert cuts > 20


def test_real_samples_count_while_their_learner_can_earn():
    state = make_state("ppo", num_envs=16)
    w, out, _ = play(state, 14)
    samples = hop.real_samples(state.args, TINY_CONFIG, w, out)
    there = on_board(TINY_CONFIG, w.board[..., 0])
    assert not there.all() and (w.reward > 0).any()
    assert torch.equal(samples["mask"], there)
    assert torch.equal(samples["ended"], w.done | (there & ~on_board(TINY_CONFIG, w.next_board[..., 0])))
    assert torch.equal(samples["action"], w.joint[..., 0].long()) and torch.equal(samples["reward"], w.reward)
    expected = out["log_probs"].gather(3, samples["action"][..., None])[..., 0]
    assert torch.equal(samples["log_prob"], expected) and (expected > -5).all(), "the action that was taken"
    batch = hop.make_ppo_batch(state.args, samples, real=True)
    given = (samples["reward"], out["value"], samples["ended"], samples["mask"])
    advantages = hop.compute_gae(state.args, *given).flatten(1, 2)
    assert torch.equal(batch["advantage"], advantages)
    assert torch.equal(batch["returns"], advantages + out["value"][:, :-1].flatten(1, 2))


def ppo_batch(args, policy, rows=24, seed=1):
    """Random samples [M, rows, ...]; of the last learner a third does not count"""
    generator, m = seeded(seed), len(policy)
    entities, *others = policy.network.sizes
    cells = torch.randint(TINY_CONFIG.num_cells + 1, (m, rows, entities), generator=generator)
    inputs = torch.cat([cells, torch.randn(m, rows, sum(others), generator=generator)], 2)
    legal = torch.rand(m, rows, 7, generator=generator) < 0.7
    legal[..., STAY] = True
    action = torch.where(legal, torch.rand(m, rows, 7, generator=generator), -1).argmax(2)
    batch = {"inputs": inputs, "legal": legal, "action": action}
    for name in ("reward", "value", "advantage", "returns"):
        batch[name] = torch.randn(m, rows, generator=generator)
    with torch.no_grad():
        batch["log_prob"] = policy(inputs, legal)[0].gather(2, action[..., None])[..., 0]
    batch["log_prob"] += 0.3 * torch.randn(m, rows, generator=generator)  # of an older policy
    batch["weight"] = torch.ones(m, rows)
    batch["weight"][-1, ::3] = 0
    return batch | {"critic_weight": batch["weight"].clone(), "real": torch.ones(m, rows)}


def new_policy(args, seeds=(1, 2)):
    policy = hop.Stacked(lambda: hop.ActorCritic(TINY_CONFIG, args), list(seeds), CPU)
    return policy, hop.Adam(policy.parameters(), args.learning_rate, eps=1e-5)


def test_updates_are_those_of_plain_ppo():
    """As CleanRL does it: each learner alone, in a loop over minibatches of the samples that count"""
    args = make_args("ppo", learning_rate=3e-3, update_epochs=3, max_grad_norm=0.4)
    policy, optimizer = new_policy(args)
    start, batch = copy.deepcopy(policy.state_dict()), ppo_batch(args, policy)
    torch.manual_seed(4)
    found = hop.ppo_update(args, policy, optimizer, batch)
    counted = batch["weight"] > 0
    assert counted.sum(1).tolist() == [24, 16]
    for m in range(2):
        agent = hop.ActorCritic(TINY_CONFIG, args)
        agent.load_state_dict({name: x[m : m + 1] for name, x in start.items()})
        adam = torch.optim.Adam(agent.parameters(), lr=3e-3, eps=1e-5)
        rows = torch.cat([counted[m].nonzero()[:, 0], (~counted[m]).nonzero()[:, 0]])  # those that count come first
        torch.manual_seed(4)
        sums, updates = {}, 0
        for _ in range(3):
            for index in torch.rand(24).argsort().tensor_split(2):
                index = rows[index][counted[m, rows[index]]]
                mb = {name: x[m : m + 1, index] for name, x in batch.items()}
                log_probs, value = agent(mb["inputs"], mb["legal"])
                dist = torch.distributions.Categorical(logits=log_probs)
                log_ratio = dist.log_prob(mb["action"]) - mb["log_prob"]
                ratio, advantage = log_ratio.exp(), mb["advantage"]
                advantage = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)
                clipped = torch.clamp(ratio, 0.8, 1.2) * advantage
                policy_loss = -torch.min(ratio * advantage, clipped).mean()
                value_loss = 0.5 * ((value - mb["returns"]) ** 2).mean()
                entropy = dist.entropy().mean()
                adam.zero_grad()
                (policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss).backward()
                norm = nn.utils.clip_grad_norm_(agent.parameters(), 0.4)
                adam.step()
                seen = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy, "grad_norm": norm}
                seen["approx_kl"] = (ratio - 1 - log_ratio).mean()
                seen["clipfrac"] = ((ratio - 1).abs() > 0.2).float().mean()
                sums = {name: sums.get(name, 0.0) + float(x.detach()) for name, x in seen.items()}
                updates += 1
        for name, p in agent.named_parameters():
            torch.testing.assert_close(policy.params[name][m : m + 1], p, atol=1e-6, rtol=1e-5)
        for name, total in sums.items():  # over all minibatches
            assert float(found[f"losses/{name}"][m]) == pytest.approx(total / updates, abs=1e-5), name
        assert sums["grad_norm"] / updates > 0.4 and 0 < sums["clipfrac"] < updates


def test_a_learners_update_does_not_depend_on_the_others():
    args = make_args("ppo")
    batch = ppo_batch(args, new_policy(args, (1, 2, 3))[0])
    results = []
    for seeds, rows, change in (((1, 2, 3), [0, 1, 2], 1), ((1, 2), [0, 1], 1), ((1, 2, 3), [0, 1, 2], 1e3)):
        policy, optimizer = new_policy(args, seeds)
        given = {name: x[rows].clone() for name, x in batch.items()}
        given["returns"][1:] *= change  # an exploding neighbour
        given["advantage"][1:] *= change**2
        torch.manual_seed(4)
        hop.ppo_update(args, policy, optimizer, given)
        results.append(policy.state_dict())
    for name, x in results[0].items():
        torch.testing.assert_close(x[:2], results[1][name], rtol=0, atol=1e-5, msg=name)
        assert torch.equal(x[0], results[2][name][0]), name
    assert any((x[1] != results[2][name][1]).any() for name, x in results[0].items())


def test_samples_without_weight_do_not_matter(monkeypatch):
    """They are left out on a CPU; on a GPU, where shapes must not change, they are there without weight."""
    args = make_args("ppo")
    policy, _ = new_policy(args)
    batch, losses = ppo_batch(args, policy), []
    off = batch["weight"] == 0
    for junk in (0.0, 1e3):
        changed = batch | {name: batch[name] + junk * off for name in ("returns", "advantage", "value")}
        losses.append(hop.ppo_loss(args, policy, changed)[0])
    assert torch.equal(*losses)
    fewer = hop.drop_masked(batch, ~off)
    assert fewer["weight"].shape == (2, 24) and (fewer["weight"][1, 16:] == 0).all()
    torch.testing.assert_close(hop.ppo_loss(args, policy, fewer)[0], losses[0])
    second = {name: x[1:] for name, x in batch.items()}
    assert hop.drop_masked(second, ~off[1:])["weight"].tolist() == [[1.0] * 16]
    assert torch.equal(hop.drop_masked(second, ~off[1:])["value"][0], batch["value"][1][~off[1]])
    assert hop.drop_masked(second, ~off[1:], least=20)["weight"].shape == (1, 20)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert hop.drop_masked(second, ~off[1:]) is second


@pytest.mark.parametrize("data", ["real", "mixed"])
def test_the_critic_learns_from_imagined_samples_only_if_asked_to(data):
    args = make_args(critic_data=data, imagined_weight=0.5)
    state = make_state(critic_data=data, imagined_weight=0.5)
    dream = hop.make_ppo_batch(args, imagined(state, starts(state, 20), horizon=2), real=False)
    w, out, _ = play(state, 8)
    real = hop.make_ppo_batch(args, hop.real_samples(args, TINY_CONFIG, w, out), real=True)
    assert real["weight"].unique().tolist() == [0, 1] and torch.equal(real["critic_weight"], real["weight"])
    assert dream["weight"].unique().tolist() == [0, 0.5] and (real["real"] == 1).all() and (dream["real"] == 0).all()
    assert torch.equal(dream["critic_weight"], dream["weight"] * (data == "mixed"))
    batch = {name: torch.cat([real[name], dream[name]], 1) for name in real}
    batch["log_prob"] = batch["log_prob"] + 0.1 * batch["action"]  # of an older policy
    loss, metrics = hop.ppo_loss(args, state.networks.policy, batch)
    other = batch | {"returns": torch.where(batch["real"] > 0, batch["returns"], 50.0)}
    loss_other, metrics_other = hop.ppo_loss(args, state.networks.policy, other)
    assert torch.equal(loss, loss_other) == (data == "real")
    assert torch.equal(metrics["losses/value_loss_real"], metrics_other["losses/value_loss_real"])
    assert (metrics_other["losses/value_loss_imagined"] > 100).all()
    changed = batch | {"advantage": torch.where(batch["real"] > 0, batch["advantage"], 3.0)}
    assert not torch.equal(hop.ppo_loss(args, state.networks.policy, changed)[0], loss), "the actor learns from both"


def test_the_actor_learns_from_imagined_samples_that_the_critic_does_not_read():
    """--critic-data real: they stay in the batch, also on a CPU, where rows that nobody counts are left out"""
    args = make_args(critic_data="real")
    found = []
    for sign in (1, -1):
        policy, optimizer = new_policy(args)
        batch = ppo_batch(args, policy)
        batch["real"] = (torch.arange(24) % 2).float().expand(2, -1)
        batch["critic_weight"] = batch["weight"] * batch["real"]
        batch["advantage"] = torch.where(batch["real"] > 0, batch["advantage"], sign * batch["advantage"])
        torch.manual_seed(4)
        hop.ppo_update(args, policy, optimizer, batch)
        found.append(policy.state_dict()["actor.weight"])
    assert (found[0] != found[1]).flatten(1).any(1).all()


@pytest.mark.parametrize("ratio", [0.0, 0.25, 0.5, 0.8, 1.0])
def test_share_of_real_samples_in_the_batch(ratio, monkeypatch):
    seen = []
    monkeypatch.setattr(hop, "ppo_update", lambda args, policy, optimizer, batch: seen.append(batch) or {})
    monkeypatch.setattr(hop, "drop_masked", lambda batch, mask, least=1: batch)
    monkeypatch.setattr(hop, "shape_reward", lambda args, config, reward, *_: reward + 100.0)
    state = make_state(ppo_real_ratio=ratio, critic_data="mixed", num_envs=16, num_steps=16, offline_ratio=0.0)
    samples = train(state)
    assert seen[0]["real"].mean() == pytest.approx(ratio, abs=0.01) and (seen[0]["reward"] >= 100).all()
    if ratio:  # every learner its own
        inputs, action = samples["outputs"]["inputs"].flatten(1, 2), samples["transitions"].joint[..., 0].flatten(1)
        assert torch.equal(seen[0]["inputs"][:, : inputs.shape[1]], inputs)
        assert torch.equal(seen[0]["action"][:, : inputs.shape[1]], action.long())


# ---------------------------------------------------------------------------------------------------------------------
# Metrics


@pytest.mark.parametrize("seats", [None, "learner,nearest_hare,learner"])
def test_charts_count_every_finished_game_of_every_seat(seats):
    state = make_state("ppo", seats=seats, num_seeds=2, num_envs=16, num_steps=20)
    _, log = recorded(state, lambda: train(state))
    metrics, returns, games = state.metrics.read(), np.zeros((32, 3)), {0: [], 1: []}
    for before, _, reward, done, _ in log:
        returns += reward.numpy()
        for b in done.nonzero()[:, 0].tolist():
            games[b // 16].append((returns[b].copy(), int(before.time[b]) + 1))
            returns[b] = 0
    learners = [i for i, name in enumerate(seats_table(seats, 3)) if name == "learner"]
    for seed, finished in games.items():
        metrics["losses/value_loss"] = metrics["losses/value_loss_real"] + 1  # that of all samples
        row = hop.log_row(state.args, metrics, seed)
        earned, length = np.array([g[0] for g in finished]), np.mean([g[1] for g in finished])
        mean = earned.mean(0)
        expected = {"episodic_return": mean[learners].mean(), "episodic_length": length}
        expected |= {f"episodic_return/player_{i}": mean[i] for i in range(3)}
        expected |= {"stag_share": (earned > 1).mean(), "hare_share": ((earned > 0) & (earned <= 1)).mean()}
        expected["nothing_share"] = (earned == 0).mean()
        for name, value in expected.items():
            assert row[f"charts/{name}"] == pytest.approx(value, rel=1e-5), name
        assert row["per_agent/return_gap"] == pytest.approx(np.ptp(mean[learners]), rel=1e-5)
        assert len(finished) > 30 and (earned > 0).any()
        own = metrics["real/value_mean"].reshape(2, -1)[seed]
        assert row["real/value_mean"] == pytest.approx(own.mean()) and len(own) == len(learners)
        for name in ("value_loss_real", "explained_variance"):
            of_learners = metrics[f"losses/{name}"].reshape(2, -1)[seed]
            logged = [row[f"per_agent/{name}/learner_{i}"] for i in range(len(learners))]
            assert logged == pytest.approx(of_learners) and len(set(logged)) == len(learners)
        assert not any(name.startswith("games/") for name in row)
    assert math.isnan(hop.log_row(state.args, metrics | {"games/ended": np.zeros((2, 3))}, 0)["charts/stag_share"])


def test_moa_metrics_are_those_of_a_plain_count(monkeypatch):
    """On every 8th step, of co-players on the board; ties share"""
    state, gone = make_state("ppo-omg", num_envs=16, num_steps=16), 0
    play(state, 4)
    w, out, episodes = play(state, 16)
    generator = np.random.default_rng(1)
    probs = generator.dirichlet(np.ones(7), (3, 2, 16, 2)).astype(np.float32)
    probs[:, :, :5] = np.array([0.3, 0.3, 0.3, 0.1, 0, 0, 0])
    logs = torch.tensor(probs).flatten(1, 2).log()
    monkeypatch.setattr(hop, "predict_actions", lambda *_: logs)
    found = hop.moa_metrics(state.args, state.games, state.networks, w, episodes)
    there = co_players_there(w, TINY_CONFIG)
    for m in range(3):
        nll, top1, ceiling, ceiling_top1 = [], [], [], []
        for (i, t), e, k in itertools.product(enumerate((7, 15)), range(16), (0, 1)):
            if not there[m, t, e, k]:
                gone += 1
                continue
            p, action = probs[m, i, e, k], int(w.joint[m, t, e, 1 + k])
            best = (p == p.max()) / (p == p.max()).sum()
            nll.append(-math.log(max(p[action], 1e-9)))
            top1.append(best[action])
            own = out["log_probs"][(m + 1 + k) % 3, t, e]
            ceiling.append(-float(own[action]))
            ceiling_top1.append(float(own[action] == own.max()))
        expected = {"nll": np.mean(nll), "top1": np.mean(top1)}
        expected |= {"ceiling/nll": np.mean(ceiling), "ceiling/top1": np.mean(ceiling_top1)}
        for name, value in expected.items():
            assert float(found[f"moa/{name}"][m]) == pytest.approx(value, rel=1e-4), name
        goals = out["goals"][m, 7::8].flatten(0, 1)
        assert float(found["omg/subgoal_norm"][m]) == pytest.approx(float(goals.norm(dim=1).mean()), rel=1e-2)
    assert gone > 5
    games = {f"games/{name}": np.ones((1, 3)) for name in ("ended", "return", "stag", "hare", "length")}
    row = hop.log_row(state.args, games | {"moa/nll": found["moa/nll"].numpy()}, 0)
    assert [row[f"per_agent/moa_nll/learner_{i}"] for i in range(3)] == pytest.approx(found["moa/nll"].tolist())
    assert row["moa/nll"] == pytest.approx(float(found["moa/nll"].mean()))


def test_batch_metrics_are_over_the_samples_that_count():
    args = make_args("ppo")
    batch = ppo_batch(args, new_policy(args)[0])
    found = hop.batch_metrics("real", batch)
    for m in range(2):
        x = {name: batch[name][m][batch["weight"][m] > 0].numpy() for name in ("reward", "returns", "value")}
        assert float(found["real/samples"][m]) == len(x["reward"])
        for name, key in (("reward", "reward"), ("return", "returns"), ("value", "value")):
            assert float(found[f"real/{name}_mean"][m]) == pytest.approx(x[key].mean(), abs=1e-5)
        assert float(found["real/return_std"][m]) == pytest.approx(x["returns"].std(), abs=1e-5)
        explained = 1 - (x["returns"] - x["value"]).var() / x["returns"].var()
        assert float(hop.explained_variance(batch)[m]) == pytest.approx(explained, abs=1e-4)
    assert hop.explained_variance(batch | {"returns": torch.ones(2, 24)}).isnan().all(), "there is nothing to explain"


def test_metrics_are_means_over_the_iterations_since_they_were_reset():
    sums = hop.MetricSums(CPU)
    for i in range(1, 5):
        sums.add({"a": torch.tensor([1.0 * i, 2.0 * i]), "b": torch.tensor([i])})
    for _ in range(2):
        found = sums.read()
        assert found["a"].tolist() == [2.5, 5.0] and found["b"].tolist() == [2.5]
    sums.reset()
    sums.add({"b": torch.tensor([3]), "a": torch.tensor([7.0, 8.0])})
    found = sums.read()
    assert found["a"].tolist() == [7.0, 8.0] and found["b"].tolist() == [3.0]
    with pytest.raises(KeyError):
        sums.add({"a": torch.tensor([7.0, 8.0])})


def test_losses_are_means_over_all_updates(monkeypatch):
    state, seen = make_state(offline_ratio=0.0), []
    state.games.replay.push(play(state, 8)[0])
    losses = hop.opponent_model_losses
    monkeypatch.setattr(hop, "opponent_model_losses", lambda *x, **y: (seen.append(losses(*x, **y)), seen[-1])[1])
    models = state.games.env, state.networks, state.optimizers["opponents"], state.games.replay
    found = hop.train_opponent_models(state.args, *models, None, torch.tensor(0.5), 3)
    names = {"losses/moa": "moa", "omg/recon": "recon", "omg/kl": "kl", "losses/opponent_models": "loss"}
    assert found.keys() == names.keys()
    for metric, name in names.items():
        torch.testing.assert_close(found[metric], torch.stack([x[name].detach() for x in seen]).mean(0))
    assert len(seen) == 3 and not torch.equal(seen[0]["moa"], seen[2]["moa"])


def test_where_nobody_was_on_the_board_the_horizon_stays(monkeypatch):
    state = make_state(trust_exact_match=0.0, offline_ratio=0.0)
    train(state)
    state.horizon.fill_(2)
    rollout = hop.rollout

    def without_the_first_learner(*given, **named):
        transitions, outputs, episodes = rollout(*given, **named)
        transitions.board[0, 0, :, 0] = state.args.config.num_cells
        return transitions, outputs, episodes

    monkeypatch.setattr(hop, "rollout", without_the_first_learner)
    train(state)
    assert state.horizon.tolist() == [2, *[state.args.imagination_horizon] * (len(state.horizon) - 1)]


def test_a_weight_of_a_half_is_every_second_sample():
    """Real samples twice beside imagined ones: as once, beside imagined ones that count half"""
    args = make_args("ppo")
    policy, _ = new_policy(args)
    real, dream = (ppo_batch(args, policy, seed=seed) for seed in (1, 2))
    dream["real"] = torch.zeros_like(dream["real"])
    halved = dream | {name: 0.5 * dream[name] for name in ("weight", "critic_weight")}
    twice = {name: torch.cat([real[name], real[name], dream[name]], 1) for name in real}
    half = {name: torch.cat([real[name], halved[name]], 1) for name in real}
    (loss, metrics), (expected, of_twice) = (hop.ppo_loss(args, policy, batch) for batch in (half, twice))
    torch.testing.assert_close(loss, expected)
    assert metrics.keys() == of_twice.keys()
    for name, x in metrics.items():
        torch.testing.assert_close(x, of_twice[name], msg=name)
    once = {name: torch.cat([real[name], dream[name]], 1) for name in real}
    unweighted = hop.ppo_loss(args, policy, once)[1]
    for name in ("losses/policy_loss", "losses/value_loss", "losses/entropy"):
        assert ((unweighted[name] - metrics[name]).abs() > 1e-4).all(), name


def test_the_loss_with_search_weighs_samples_alike():
    """Where nothing was searched it is the loss of the other script"""
    args = make_args("ppo")
    policy, _ = new_policy(args)
    real, dream = (ppo_batch(args, policy, seed=seed) for seed in (1, 2))
    dream |= {"weight": 0.5 * dream["weight"], "critic_weight": 0.0 * dream["weight"]}
    dream["real"] = torch.zeros_like(dream["real"])
    batch = {name: torch.cat([real[name], dream[name]], 1) for name in real}
    nothing_searched = {"distilled": torch.zeros_like(batch["weight"]), "log_probs": torch.zeros(*batch["legal"].shape)}
    loss, metrics = hopplus_mcts.ppo_loss(args, policy, batch | nothing_searched)
    expected, of_expected = hop.ppo_loss(args, policy, batch)
    torch.testing.assert_close(loss, expected)
    for name, x in of_expected.items():
        torch.testing.assert_close(metrics[name], x, msg=name)


def test_imagined_games_start_with_what_was_remembered_in_their_own_step():
    """The replay keeps the first history of a rollout alone; the others are inferred again"""
    state = make_state(num_envs=12)
    play(state, 8)
    w, _, _ = play(state, 8)
    kept = w._replace(history=w.history[:, :1])
    start = hop.replayed_states(state.args, state.games.env, state.networks, kept)
    assert torch.equal(start.board, w.board.flatten(1, 2)) and torch.equal(start.time, w.time.flatten(1, 2))
    torch.testing.assert_close(start.history, w.history.flatten(1, 2).float(), atol=0.1, rtol=0.02)  # half precision
    assert ((w.history[:, 1:] - w.history[:, :1]).abs().amax((3, 4)) > 0.5).float().mean() > 0.9
