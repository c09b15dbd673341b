"""The full loop: whose steps are whose, what imagination may do, what each loss counts, and what a run leaves behind."""

import copy
import csv
import dataclasses
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import helpers
import numpy as np
import pytest
import torch
from helpers import (
    PRETRAINING_CASES,
    NoNonFiniteCasts,
    lines_of,
    mixed_actions,
    parts_of,
    random_kinds,
    same_tree,
    seeded,
    without_times,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hopplus_ppo as hop
import pretrain_vae as vae
import pretrain_world_model as wm
from stag_hunt_env import HUNT_HARE, HUNT_STAG, STAY, StagHuntEnv, StagHuntFlags, State, copy_state

CPU = torch.device("cpu")
CONFIG = helpers.TINY_CONFIG
LEARNERS = "learner,learner,learner"
TINY = {**helpers.TINY, "num_goals": 5}
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def no_pictures(monkeypatch):
    for name in ("draw_pictures", "film"):
        monkeypatch.setattr(hop, name, lambda *_: None)


def args_of(**changes):
    return hop.resolved(hop.Args(**{**TINY, **changes}))


def experiment(rehearsed=0, device=CPU, **changes):
    args = args_of(device=device.type, **changes)
    kinds = [hop.seat_kinds(args.seats.split(","))] * args.num_seeds
    seating = hop.make_seating(kinds, args.num_envs, args.share_parameters, device)
    return hop.make_experiment(args, seating, list(range(args.seed, args.seed + args.num_seeds)), device, rehearsed)


def play(x, num_steps, **options):
    return hop.rollout(x.args, x.env, x.seating, x.nets, x.carry, x.generator, num_steps, **options)


def recorded(x, function):
    """What function() returns, and what went through the game meanwhile: [(state before, actions, reward, done)], by seat"""
    log, step = [], x.env.step

    def watched(actions):
        before = copy_state(x.env.state)
        results = step(actions)
        log.append((before, actions.clone(), results[1].clone(), results[3].clone()))
        return results

    x.env.step = watched
    try:
        return function(), log
    finally:
        x.env.step = step


def places(x):
    """(game, seat) of each (learner, row), in plain Python"""
    names, found = x.args.seats.split(","), {}
    seats, games = [i for i, name in enumerate(names) if name == "learner"], x.args.num_envs
    for s in range(x.args.num_seeds):
        for number, seat in enumerate(seats):
            for e in range(games):
                place = (s, number * games + e) if x.args.share_parameters else (s * len(seats) + number, e)
                found[place] = s * games + e, seat
    return found


def steps_of(**fields):
    return hop.Steps(**{**dict.fromkeys(hop.Steps._fields), **fields})


def choices_of(**fields):
    return hop.Choices(**{**dict.fromkeys(hop.Choices._fields), **fields})


def weights(net):
    return [p.detach().clone() for p in net.parameters()]


# ---------------------------------------------------------------------------------------------------------------------
# Who sits where

SEATINGS = [(LEARNERS, False), ("random,learner,learner", False), (LEARNERS, True), ("learner,nearest_hare,learner", True)]
every_seating = pytest.mark.parametrize(("seats", "share"), SEATINGS)


@every_seating
def test_seating_gives_each_learner_its_own_rows_and_back(seats, share):
    blocks, games, names = 3, 5, seats.split(",")
    seating = hop.make_seating([hop.seat_kinds(names)] * blocks, games, share, CPU)
    number = 100 * torch.arange(blocks * games)[:, None] + torch.arange(3)
    x = torch.stack([number, -number], 2)
    learners = [i for i, name in enumerate(names) if name == "learner"]
    own = [[[100 * (s * games + e) + i for e in range(games)] for i in learners] for s in range(blocks)]
    expected = torch.tensor(own).flatten(1) if share else torch.tensor(own).flatten(0, 1)
    ours = seating.to_learners(x)
    assert torch.equal(ours[..., 0], expected) and torch.equal(ours[..., 1], -expected)
    is_learner = torch.tensor([name == "learner" for name in names])[:, None]
    assert torch.equal(seating.to_seats(ours, x + 7), torch.where(is_learner, x, x + 7))


def test_learners_may_sit_elsewhere_in_each_block():
    kinds = [hop.seat_kinds(names) for names in (["learner", "random", "random"], ["random", "random", "learner"])]
    seating = hop.make_seating(kinds, 2, False, CPU)
    x = 100 * torch.arange(4)[:, None] + torch.arange(3)
    assert seating.to_learners(x).tolist() == [[0, 100], [202, 302]]
    assert seating.to_seats(seating.to_learners(x), 0 * x).tolist() == [[0, 0, 0], [100, 0, 0], [0, 0, 202], [0, 0, 302]]


@every_seating
def test_a_rollout_holds_what_each_learner_saw_did_and_earned(seats, share):
    x = experiment(seats=seats, share_parameters=share, num_seeds=2, num_envs=6)
    (w, c, _), log = recorded(x, lambda: play(x, 14))
    at = {place: (m, row) for (m, row), place in places(x).items()}
    previous, seen = None, set()
    for t, (before, actions, reward, done) in enumerate(log):
        after, *_ = x.env.transition(before, actions)
        now, later, legal = x.env.observe(before), x.env.observe(after), x.env.legal_actions(before)
        for (m, row), (b, i) in places(x).items():
            ego = [(i + k) % 3 for k in range(3)]
            assert torch.equal(w.board[m, t, row], now[b, i]) and torch.equal(w.next_board[m, t, row], later[b, i])
            assert w.joint[m, t, row].tolist() == actions[b, ego].tolist()
            assert w.reward[m, t, row].tolist() == reward[b, ego].tolist()
            assert w.done[m, t, row] == done[b] and w.time[m, t, row] == before.time[b]
            assert w.first_hunt[m, t, row] == before.first_hunt[b]
            assert w.prey[m, t, row].tolist() == before.prey_position[b].tolist()
            last = [STAY] * 3 if before.time[b] == 0 else previous[b, ego].tolist()
            assert w.last_joint[m, t, row].tolist() == last
            assert torch.equal(c.legal[m, t, row], legal[b, i])
            assert w.left[m, t, row, 0] == (before.present[b, i] and not after.present[b, i])
            for k in (1, 2):
                probs, other = c.truth[m, t, row, k - 1], at.get((b, ego[k]))
                if other is None:
                    assert probs[actions[b, ego[k]]] > 0 and float(probs.sum()) == pytest.approx(1, abs=1e-5)
                else:
                    assert torch.equal(probs, c.log_probs[other[0], t, other[1]].exp())
            seen |= {("done", bool(done[b])), ("earners", int((reward[b] > 0).sum())), ("first", int(before.time[b]) == 0)}
        previous = actions
    assert {("done", True), ("earners", 1), ("first", True), ("first", False)} <= seen


@pytest.mark.parametrize("seats", ["learner,mixed,nearest_hare", "mixed,learner,mixed"])
def test_players_change_only_between_games_and_only_where_mixed(seats):
    x = experiment(seats=seats, num_envs=16, method="ppo", num_seeds=2)
    names, changes, kinds = seats.split(","), 0, x.carry["kinds"].clone()
    for _ in range(25):
        _, ((*_, done),) = recorded(x, lambda: play(x, 1))
        new = x.carry["kinds"].clone()
        changed = new != kinds
        assert not changed[~done].any()
        for i, name in enumerate(names):
            if name == "mixed":
                changes += int(changed[:, i].sum())
                assert set(new[:, i].tolist()) <= {0, 1, 2}
            else:
                assert set(new[:, i].tolist()) == set(hop.seat_kinds([name]))
        kinds = new
    assert changes > 50


def test_the_oracle_tells_who_sits_there():
    x = experiment(subgoals="oracle", seats="learner,nearest_stag,mixed", num_envs=8)
    for _ in range(15):
        kinds = x.carry["kinds"].clone()
        w, _, _ = play(x, 1)
        assert torch.equal(w.told[0, 0].argmax(2), kinds[:, 1:] - hop.MIXED) and (w.told.sum(4) == 1).all()
        dream = dream_of(x, hop.Steps(*(f[:, 0] for f in w)), torch.ones_like(w.done[:, 0]), TrueWorld(x.env, w.prey[:, 0]))
        assert torch.equal(dream["goals"], w.told.flatten(3).expand_as(dream["goals"]))
    assert len(kinds[:, 2].unique()) > 1


# ---------------------------------------------------------------------------------------------------------------------
# Boards and thoughts


@pytest.mark.parametrize("config", PRETRAINING_CASES.values(), ids=PRETRAINING_CASES)
def test_views_of_a_board_are_those_of_the_game(config):
    env, generator = StagHuntEnv(config, 40, seed=2), seeded(3)
    kinds = random_kinds(env, generator)
    for _ in range(6):
        state, seats = env.state, range(config.num_players)
        prey = state.prey_position.long().expand(config.num_players, -1, -1)
        things, walls, legal = hop.all_views(env, env.observe(state).transpose(0, 1), prey)
        expected = [env.seats_to_ego(y).transpose(0, 1) for y in (vae.things(config, env, state), env.legal_actions(state))]
        assert torch.equal(things, expected[0].long()) and torch.equal(legal, expected[1])
        if config.max_wall_pieces:
            assert all(torch.equal(walls[i, :, k], state.walls.float()) for i in seats for k in seats)
        assert state.present.any() and (config.max_wall_pieces == 0 or state.walls.any())
        env.step(mixed_actions(env, state, kinds, 0.2, generator))
    assert not env.state.present.all()


def test_co_players_actions_are_kept_apart_in_their_own_order():
    x = experiment(method="ppo-omg")
    w, _, _ = play(x, 1)
    board, prey, summary = w.board[:, 0], w.prey[:, 0].long(), torch.randn(3, 4, 2, 8, generator=seeded(1))
    thought = hop.think(x.args, x.env, x.nets.models, board, prey, w.time[:, 0] / 6, summary, w.told[:, 0], seeded(2))
    over, inference = torch.zeros(3, 4, dtype=torch.bool), x.nets.models.inference

    def after(*joint):
        joint = torch.tensor(joint).expand(3, 4, 3)
        return hop.remember(x.args, x.env, x.nets.models, thought, joint, summary, over)

    one, swapped, two, none = after(0, 5, 1), after(0, 1, 5), after(0, 5, 5), after(0, 1, 1)
    for other in (swapped, two, none):
        assert (one != other).any(3).all(), "every co-player's summary should change"
    assert (one[:, :, 0] != after(1, 5, 0)[:, :, 0]).any(2).all(), "the first co-player sees who does what"
    assert (one[:, :, 1] != after(5, 0, 1)[:, :, 1]).any(2).all(), "and the second"
    state = thought.state.view(3, 4, 2, 8)
    for k, own_order in ((0, [5, 1, 0]), (1, [1, 0, 5])):
        event = inference.evidence(state[:, :, k], torch.tensor(own_order).expand(3, 4, 3))
        expected = inference.decay.sigmoid() * summary[:, :, k] + event
        torch.testing.assert_close(one[:, :, k], expected)


@pytest.mark.parametrize("belief", [False, True])
def test_what_is_remembered_across_the_end_of_a_game(belief):
    x = experiment(method="ppo-omg", inter_episode_belief=belief, memory_discount=0.5, num_envs=8, forget=0.0)
    x.nets.models.inference.event[1].bias.data += 0.1  # so that every step leaves a trace
    ends = 0
    for _ in range(14):
        before = x.carry["summary"].clone()
        w, _, _ = play(x, 1)
        one = [y[:, 0] for y in (w.board, w.prey.long(), w.time / 6)]
        thought = hop.think(x.args, x.env, x.nets.models, *one, before, w.told[:, 0], seeded(1))
        never = torch.zeros_like(w.done[:, 0])
        full = hop.remember(x.args, x.env, x.nets.models, thought, w.joint[:, 0], before, never)
        now, over = x.carry["summary"], w.done[:, 0]
        torch.testing.assert_close(now[~over], full[~over])
        torch.testing.assert_close(now[over], 0.5 * full[over] if belief else torch.zeros_like(full[over]))
        gone = w.board[:, 0, :, 1:3].flatten(3).amax(3) == 0
        assert torch.equal(full[gone], before[gone]), "who has left adds nothing"
        assert ((full != before).any(3) | gone).all()
        assert (now[~over] != 0).any(2).all() and (x.carry["last_joint"][over] == STAY).all()
        assert (w.summary[:, 0][w.time[:, 0] > 0] != 0).any(2).all(), "not forgotten before the last step"
        ends += int(over.sum())
    assert ends > 5


def test_some_learners_forget_everything_after_a_game_and_only_then():
    """Else a policy never meets strangers in training, and plays badly with them (1.1 where it had 2.9 in training)."""
    x, ends, forgotten = experiment(method="ppo-omg", num_envs=64, forget=0.25), 0, 0
    for _ in range(14):
        w, _, _ = play(x, 1)
        forgot, over = w.forgot[:, 0], w.done[:, 0]
        assert not (forgot & ~over).any()
        assert (x.carry["summary"][forgot] == 0).all() and (x.carry["summary"][over & ~forgot] != 0).any(2).all()
        ends, forgotten = ends + int(over.sum()), forgotten + int(forgot.sum())
    assert 0.15 < forgotten / ends < 0.35 and ends > 200
    assert not play(experiment(method="ppo-omg", forget=0.0), 14)[0].forgot.any()
    assert not play(experiment(method="ppo-omg", forget=1.0, inter_episode_belief=False), 14)[0].forgot.any()


@pytest.mark.parametrize("belief", [False, True])
def test_looking_back_over_a_window_gives_the_same_summaries(belief):
    x = experiment(method="ppo-omg", inter_episode_belief=belief, num_envs=8, forget=0.5)
    play(x, 3)
    start = x.carry["summary"].clone()
    w, _, _ = play(x, 12)
    *_, summaries, last = hop.look_back(x.args, x.env, x.nets.models, w, start)
    torch.testing.assert_close(summaries, w.summary.float(), atol=5e-3, rtol=5e-3)
    torch.testing.assert_close(last, x.carry["summary"])
    assert w.done[:, :-1].any() and summaries.abs().max() > 0.1


def test_rehearsed_rollouts_are_summed_up_anew_in_the_order_of_time():
    x = experiment(rehearsed=4, method="ppo-omg", replay_rollouts=3, memory_discount=1.0)
    rollouts = [play(x, 8)[0] for _ in range(3)]
    for w in rollouts:
        x.rehearsed.push(w)
    x.rehearsed.carried.copy_(x.carry["summary"])  # before the first comes the last
    whole = hop.Steps(*(torch.cat(field, 1) for field in zip(*rollouts, strict=True)))
    for number in range(3):
        x.rehearsed.steps.summary[number] = math.nan
        hop.refresh(x.args, x.env, x.nets.models, x.rehearsed)
        *_, expected, last = hop.look_back(x.args, x.env, x.nets.models, whole, x.carry["summary"])
        ours = x.rehearsed.steps.summary[number].float()
        torch.testing.assert_close(ours, expected[:, 8 * number : 8 * number + 8], atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(x.rehearsed.carried, last, atol=1e-3, rtol=1e-3)
    hop.refresh(x.args, x.env, x.nets.models, x.rehearsed)
    torch.testing.assert_close(x.rehearsed.steps.summary[0, :, 0].float(), last, atol=2e-2, rtol=2e-2)


# ---------------------------------------------------------------------------------------------------------------------
# Losses of the models


class ValueOfGoals:
    """V = the sum of the goals, or its negative where the clock has run out"""

    @staticmethod
    def inputs(board, clock, last_joint, goals):
        return torch.cat([clock[..., None], goals], 2)

    @staticmethod
    def value(x):
        return x[..., 1:].sum(-1) * (1 - 2 * x[..., 0])


HINDSIGHT = [  # selection, horizon, step chosen at each step for a co-player that stays and for one that leaves
    ("conservative", 5, [1, 2, 2, 4, 5, 5], [1, 1, 2, 3, 4, 5]),
    ("conservative", 1, [1, 2, 2, 4, 5, 5], [1, 1, 2, 3, 4, 5]),
    ("optimistic", 5, [2, 2, 2, 5, 5, 5], [1, 1, 2, 3, 4, 5]),
    ("optimistic", 1, [1, 2, 2, 4, 5, 5], [1, 1, 2, 3, 4, 5]),
    ("final", 5, [2, 2, 2, 5, 5, 5], [1, 1, 2, 3, 4, 5]),
]


@pytest.mark.parametrize(("selection", "horizon", "stays", "leaves"), HINDSIGHT)
def test_hindsight_by_hand(selection, horizon, stays, leaves):
    """Two games, steps 0-2 and 3-5; in step 3 the clock has run out, so that the highest goal has the lowest V."""
    mean = torch.tensor([3.0, 1.0, 2.0, -9.0, 5.0, 4.0])
    prior = torch.stack([mean, torch.arange(6.0)], 1)[None, :, None, None].expand(1, 6, 1, 2, 2)
    present = torch.tensor([[1, 1], [1, 1], [1, 0], [1, 1], [1, 0], [1, 0]], dtype=torch.bool)[None, :, None]
    done = torch.tensor([0, 0, 1, 0, 0, 0], dtype=torch.bool).view(1, 6, 1)
    clock = torch.tensor([0, 0, 0, 6, 0, 0]).view(1, 6, 1)
    w = steps_of(done=done, board=torch.zeros(1, 6, 1, 6, 3, 4), time=clock, last_joint=torch.zeros(1, 6, 1, 3))
    goals = torch.tensor([100.0, -100.0]).view(1, 1, 1, 2, 1).expand(1, 6, 1, 2, 1)
    args = args_of(subgoal_horizon=horizon, goal_dim=1)
    chosen = hop.hindsight(args, CONFIG, ValueOfGoals, selection, w, goals, prior, present)
    assert chosen[0, :, 0, 0, 1].tolist() == stays and chosen[0, :, 0, 1, 1].tolist() == leaves
    assert torch.equal(chosen[..., 0], mean[chosen[..., 1].long()])


def moa_loss(x, w, data):
    args = dataclasses.replace(x.args, moa_data=data)
    return hop.subgoal_losses(args, x.env, x.nets, w, 0.0, seeded(5), False)["moa"].detach()


def without_events(x):
    """q_phi's summaries no longer depend on the actions, which are then nothing but MOA's labels."""
    with torch.no_grad():
        x.nets.models.inference.event[1].weight.zero_()


def test_moa_does_not_learn_from_players_who_left():
    x = experiment(method="ppo-omg", num_envs=8, num_steps=12)
    without_events(x)
    w, _, _ = play(x, 12)
    gone = w.board[:, :, :, 1:3].flatten(4).amax(4) == 0
    assert gone.any((1, 2, 3)).all() and not gone.all()
    joint = w.joint.clone()
    joint[..., 1:][gone] = 0
    changed = w._replace(joint=joint)
    torch.testing.assert_close(moa_loss(x, changed, "present"), moa_loss(x, w, "present"), atol=1e-6, rtol=0)
    assert (moa_loss(x, changed, "all") > moa_loss(x, w, "all") + 1).all()
    joint = w.joint.clone()
    joint[..., 1:][~gone] = STAY
    assert (moa_loss(x, w._replace(joint=joint), "present") != moa_loss(x, w, "present")).all()


def test_rewarded_counts_only_games_in_which_the_co_player_scored():
    x = experiment(method="ppo-omg", num_envs=16, num_steps=14)
    without_events(x)
    w, _, _ = play(x, 14)
    scored = torch.zeros(w.joint[..., 1:].shape, dtype=torch.bool)
    for m, e, k in np.ndindex(len(w.done), w.done.shape[2], 2):
        first = 0
        for t in range(14):
            if w.done[m, t, e] or t == 13:
                scored[m, first : t + 1, e, k] = bool((w.reward[m, first : t + 1, e, 1 + k] > 0).any())
                first = t + 1
    present = w.board[:, :, :, 1:3].flatten(4).amax(4) > 0
    for where, matters in ((present & ~scored, False), (~present, False), (present & scored, True)):
        joint = w.joint.clone()
        joint[..., 1:][where] = STAY
        assert (joint != w.joint).flatten(1).any(1).all() or not matters
        before, after = moa_loss(x, w, "rewarded"), moa_loss(x, w._replace(joint=joint), "rewarded")
        assert (before != after).all() == matters and torch.allclose(before, after, atol=1e-6, rtol=0) != matters


def test_losses_of_one_learner_do_not_reach_another():
    x = experiment(num_seeds=2)
    w, c, _ = play(x, 8)
    x.replay.push(w)
    pairs = [(x.nets.models, hop.subgoal_losses(x.args, x.env, x.nets, w, 0.5, x.generator, True)["total"])]
    one = hop.Steps(*(f[:, 0] for f in w))
    weight = torch.ones_like(one.done).float()
    pairs.append((x.nets.world, x.nets.world.loss(one.board, one.joint, one.next_board, one.reward[..., 0], weight)))
    inputs = x.nets.policy.inputs(one.board, one.time / 6, one.last_joint, c.goals[:, 0])
    log_probs, value = x.nets.policy(inputs, c.legal[:, 0])
    pairs.append((x.nets.policy, log_probs[..., STAY].sum(1) + value.sum(1)))
    for net, loss in pairs:
        loss[2].backward()
        grads = [p.grad for p in net.parameters() if p.grad is not None]
        assert len(grads) > 5 and any((g[2] != 0).any() for g in grads)
        assert all((g[m] == 0).all() for g in grads for m in range(6) if m != 2)


def test_world_model_learns_only_from_steps_on_the_board():
    x = experiment()
    for _ in range(2):
        x.replay.push(play(x, 8)[0])
    w = hop.sample_transitions([(x.replay, 1.0)], 200, 3, seeded(1))
    weight = hop.present_weight(CONFIG, w.board).float()
    assert torch.equal(weight > 0, w.board[:, :, 0].flatten(2).any(2)) and 0 < weight.mean() < 1
    assert hop.present_weight(dataclasses.replace(CONFIG, prosocial=True), w.board).all(), "these rewards go on"
    other = w._replace(reward=torch.where(weight[..., None] > 0, w.reward, 5.0))
    one, two = (x.nets.world.loss(y.board, y.joint, y.next_board, y.reward[..., 0], weight) for y in (w, other))
    torch.testing.assert_close(one, two)


# ---------------------------------------------------------------------------------------------------------------------
# Replay


def numbered_replay(room, first=0):
    """A replay in which every field of step t of game e of learner m of the k-th rollout is 1000k + 100m + 10t + e"""
    number = (100 * torch.arange(2)[:, None, None] + 10 * torch.arange(3)[:, None] + torch.arange(4)) + first

    def rollout(k):
        board = (1000 * k + number)[..., None, None, None]
        return hop.Steps(**{**dict.fromkeys(hop.Steps._fields, 1000 * k + number), "board": board})

    empty = hop.Steps(*(torch.full((room, *x.shape), -1) for x in rollout(0)))
    return hop.Replay(empty, torch.zeros((), dtype=torch.int64), torch.zeros(1)), rollout


def test_the_replay_overwrites_the_oldest_and_draws_only_what_is_filled():
    replay, rollout = numbered_replay(3)
    for k in range(1, 7):
        replay.push(rollout(k))
        last = set(range(max(1, k - 2), k + 1))
        w = hop.sample_transitions([(replay, 1.0)], 800, 4, seeded(1))
        assert torch.equal(w.done, w.time) and torch.equal(w.done, w.board[..., 0, 0, 0])
        for model in range(4):  # two models per learner
            expected = {1000 * r + 100 * (model // 2) + 10 * t + e for r in last for t in range(3) for e in range(4)}
            assert set(w.done[model].tolist()) == expected
        windows = hop.sample_windows([(replay, 1.0)], 200, seeded(1)).done
        assert windows.shape == (2, 3, 200) and set((windows[:, 0] // 1000).flatten().tolist()) == last
        assert torch.equal(windows - windows[:, :1], torch.tensor([0, 10, 20])[:, None].expand(2, 3, 200))
        assert torch.equal(windows % 1000 // 100, torch.arange(2)[:, None, None].expand(2, 3, 200))


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_rehearsed_games_make_up_their_share(share):
    x = experiment(rehearsed=4, rehearsal=share)
    assert [part for _, part in x.sources()] == [1 - share, share] and x.sources()[1][0] is x.rehearsed
    (replay, rollout), (old, old_rollout) = numbered_replay(3), numbered_replay(2, 500_000)
    replay.push(rollout(1))
    old.push(old_rollout(1))
    sources = [(replay, 1 - share), (old, share)]
    w = hop.sample_transitions(sources, 40, 2, seeded(1))
    windows = hop.sample_windows(sources, 40, seeded(1))
    assert w.done.shape == (2, 40) and windows.done.shape == (2, 3, 40)
    for drawn in (w.done, windows.done[:, 0]):
        assert ((drawn > 400_000).float().mean(1) == share).all()
    assert [part for _, part in experiment(rehearsed=4, rehearsal=0.0).sources()] == [1.0]


def test_imagination_never_starts_from_rehearsed_games(monkeypatch):
    x, seen, imagine = experiment(rehearsed=4), [], hop.imagine
    for field in x.rehearsed.steps:
        field.fill_(1)  # every cell of every plane
    x.rehearsed.pushed.fill_(2)
    monkeypatch.setattr(hop, "imagine", lambda *args: (seen.append(args[3]), imagine(*args))[1])
    hop.iterate(x, False, False)
    assert len(seen) == 1 and (seen[0].board[:, :, 0].flatten(2).sum(2) <= 1).all()


# ---------------------------------------------------------------------------------------------------------------------
# Imagination


class TrueWorld(nn.Module):
    """The rules in the place of the world model; `wrong` changes what the second member says"""

    def __init__(self, env, prey, members=1, wrong=lambda board, step: board):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(len(prey) * members, 1))
        self.env, self.prey, self.members, self.wrong, self.said = env, prey.long(), members, wrong, []

    def predict(self, board, joint, with_raw=True):
        config, n = self.env.config, self.env.config.num_players
        planes = board.flatten(0, 1).flatten(2)
        prey = self.prey.repeat_interleave(self.members, 0).flatten(0, 1)
        stags, hares = prey.split([config.num_stags, config.num_hares], 1)
        alive = torch.cat([planes[:, n + 1].gather(1, stags), planes[:, n + 2].gather(1, hares)], 1) > 0
        clock = torch.zeros(len(planes), dtype=torch.int32)
        present = planes[:, :n].amax(2) > 0
        state = State(planes[:, :n].argmax(2).int(), present, prey.int(), alive, planes[:, n], clock, clock - 1)
        after, reward, _, _ = self.env.transition(state, joint.flatten(0, 1).long())
        new, reward = self.env.observe(after)[:, 0].view_as(board).clone(), reward[:, 0].view(board.shape[:2])
        new[1 :: self.members] = self.wrong(new[1 :: self.members], len(self.said)) if self.members > 1 else new[1::1]
        self.said.append(new[:: self.members])
        return hop.Prediction(new, new.float(), reward)


def starts(x, count=30, rollouts=2):
    for _ in range(rollouts):
        x.replay.push(play(x, x.args.num_steps)[0])
    start = hop.sample_transitions([(x.replay, 1.0)], count, len(x.trusted), x.generator)
    return start, hop.present_weight(x.env.config, start.board)


def dream_of(x, start, alive, world=None, horizon=5, trusted=None):
    nets = x.nets if world is None else x.nets._replace(world=world)
    trusted = torch.full_like(x.trusted, horizon) if trusted is None else torch.tensor(trusted)
    dream = hop.imagine(x.args, x.env, nets, start, alive, horizon, trusted, x.generator)
    return dream | parts_of(x, dream["inputs"])


def test_subgoals_are_the_last_inputs_and_padding_comes_first():
    x = experiment(goal_dim=6)
    _, c, _ = play(x, 4)
    found = parts_of(x, c.inputs)
    assert x.nets.policy.padding == 6 and torch.equal(found["goals"], c.goals), "hindsight exchanges the last inputs"
    assert (found["board"].flatten(4).sum(4)[..., : x.env.config.num_players] <= 1).all() and (found["board"] > 0).any()


@pytest.mark.parametrize("limit", [None, 1])
def test_imagined_games_follow_the_rules_and_end(limit):
    x = experiment(config=dataclasses.replace(CONFIG, steps_after_first_hunt=limit), num_envs=12)
    start, alive = starts(x, 60)
    world = TrueWorld(x.env, start.prey)
    dream = dream_of(x, start, alive, world)
    time, first, board, expected, ends = start.time.int(), start.first_hunt.int(), start.board, alive, {}
    for k in range(5):
        assert torch.equal(dream["board"][:, k], board) and torch.equal(dream["alive"][:, k], expected)
        torch.testing.assert_close(dream["clock"][:, k], time / 6)
        things, _, legal = hop.all_views(x.env, board, start.prey.long())
        assert torch.equal(dream["legal"][:, k], legal[:, :, 0])
        assert legal[:, :, 0].gather(2, dream["action"][:, k][..., None]).all()
        if k < 4:  # MOA chose for the others
            joint = dream["last_joint"][:, k + 1].long()
            assert torch.equal(joint[..., 0], dream["action"][:, k]) and legal.gather(3, joint[..., None]).all()
        after, time = world.said[k], time + 1
        caught = after[:, :, 4:].flatten(2).sum(2) < board[:, :, 4:].flatten(2).sum(2)
        first = torch.where(caught & (first < 0), time, first)
        left = (things[:, :, 0, 0] < 12) & (after[:, :, 0].flatten(2).amax(2) == 0)
        ends["clock"], ends["left"], gone = time >= 6, left, after[:, :, 0].flatten(2).amax(2) == 0
        ends["limit"] = (first >= 0) & (time - first >= limit) if limit is not None else torch.zeros_like(alive)
        assert torch.equal(dream["ended"][:, k], ends["clock"] | gone | ends["limit"])
        board, expected = after, expected & ~dream["ended"][:, k]
        if k == 1:
            assert all((y & dream["alive"][:, k]).any() for name, y in ends.items() if name != "limit" or limit)
    assert (~alive).any() and not dream["alive"][:, 0][~alive].any(), "who has left imagines nothing"
    batch = hop.batch_of(x.args, dream, real=False)
    assert torch.equal(batch["weight"] > 0, dream["alive"].flatten(1, 2))


def test_prosocial_games_are_imagined_to_their_end():
    x = experiment(config=dataclasses.replace(CONFIG, prosocial=True), wm_head="pixel", num_envs=12)
    start, alive = starts(x, 60)
    world = TrueWorld(x.env, start.prey)
    dream = dream_of(x, start, alive, world, horizon=3)
    players = torch.stack(world.said, 1)[:, :, :, :3].flatten(3).amax(3) > 0
    time = start.time[:, None] + torch.arange(1, 4).view(1, 3, 1)
    assert torch.equal(dream["ended"], (time >= 6) | ~players)


@pytest.mark.parametrize("goal_kind", ["continuous", "discrete"])
def test_imagined_subgoals_are_inferred_as_real_ones_are(goal_kind):
    x = experiment(goal_kind=goal_kind, num_envs=8)
    w, c, _ = play(x, 8)
    real = hop.Steps(*(f[:, 3] for f in w))
    dream = dream_of(x, real, torch.ones_like(real.done))
    torch.testing.assert_close(dream["goals"][:, 0], c.goals[:, 3], atol=1e-2, rtol=1e-2)  # the replay holds half precision
    torch.testing.assert_close(dream["value"][:, 0], c.value[:, 3], atol=1e-2, rtol=1e-2)
    assert (dream["goals"] != 0).any(3).all()
    summary, models, never = real.summary.float(), x.nets.models, torch.zeros_like(real.done)
    for k in range(5):
        board, clock = dream["board"][:, k], dream["clock"][:, k]
        thought = hop.think(x.args, x.env, models, board, real.prey.long(), clock, summary, real.told, seeded(1))
        torch.testing.assert_close(dream["goals"][:, k], thought.goals)
        last = dream["last_joint"][:, k]
        log_probs, value = x.nets.policy(x.nets.policy.inputs(board, clock, last, thought.goals), thought.legal)
        torch.testing.assert_close(dream["value"][:, k], value)
        own = log_probs.gather(2, dream["action"][:, k][..., None])[..., 0]
        torch.testing.assert_close(dream["log_prob"][:, k], own)
        if k < 4:
            joint = dream["last_joint"][:, k + 1]
            summary = hop.remember(x.args, x.env, models, thought, joint, summary, never)


def test_imagined_co_players_are_drawn_from_moa():
    x = experiment()
    w, _, _ = play(x, 1)
    start = hop.Steps(*(f[:1, 0, :1].expand(1, 4000, *f.shape[3:]) for f in w))
    models = copy.deepcopy(x.nets.models)
    for p in models.moa.head.parameters():
        p.data *= 200  # far from uniform
    policy = copy.deepcopy(x.nets.policy)
    for p in (*models.parameters(), *policy.parameters()):
        p.data = p.data[:1]
    x.nets = hop.Nets(policy, models, TrueWorld(x.env, start.prey))
    x.trusted = x.trusted[:1]
    dream = dream_of(x, start, torch.ones_like(start.done), x.nets.world, 2)
    clock = start.time / 6
    expected = hop.think(x.args, x.env, models, start.board, start.prey.long(), clock, start.summary, start.told, seeded(3))
    probs = expected.expected.exp().mean(1)[0]
    for k in range(2):
        counts = torch.bincount(dream["last_joint"][0, 1, :, 1 + k].long(), minlength=7) / 4000
        torch.testing.assert_close(counts, probs[k].detach(), atol=0.05, rtol=0)
    assert probs.amax(1).min() > 0.3


@pytest.mark.parametrize("sign", [1, -1])
def test_imagined_rewards_are_clipped_to_the_payoffs(sign):
    x = experiment(wm_head="pixel")
    with torch.no_grad():
        x.nets.world.head.bias[..., -1] = sign * 1e6
    start, alive = starts(x)
    assert (dream_of(x, start, alive)["reward"] == (5.0 if sign > 0 else 0.0)).all()
    x.args = dataclasses.replace(x.args, imagined_reward_clip=False)
    assert (dream_of(x, start, alive)["reward"] * sign > 9e5).all()


def test_imagination_stops_at_the_trusted_step_and_bootstraps():
    x = experiment(gae_lambda=0.9, gamma=0.8)
    start, alive = starts(x)
    dream = dream_of(x, start, alive, TrueWorld(x.env, start.prey), 4, [0, 2, 4])
    whole = alive
    for k in range(4):
        for m, trusted in enumerate((0, 2, 4)):
            assert torch.equal(dream["alive"][m, k], whole[m] & (k < trusted))
        whole = whole & ~dream["ended"][:, k]
    batch = hop.batch_of(x.args, dream, real=False)
    last = dream["alive"][1, 1] & ~dream["ended"][1, 1]
    target = batch["target"].unflatten(1, (4, -1))[1, 1][last]
    torch.testing.assert_close(target, dream["reward"][1, 1][last] + 0.8 * dream["value"][1, 2][last])
    assert last.any() and batch["weight"][0].sum() == 0


def test_imagination_stops_where_the_ensemble_disagrees():
    x = experiment(wm_ensemble=2)
    start, alive = starts(x)
    rows = torch.arange(30) % 2 == 0

    def wrong(board, step):
        return torch.where((rows & (step >= 2)).view(1, -1, 1, 1, 1), 1 - board, board)

    dream = dream_of(x, start, alive, TrueWorld(x.env, start.prey, 2, wrong), 5)
    expected = alive
    for k in range(5):
        expected = expected & ~(rows & (k >= 2))
        assert torch.equal(dream["alive"][:, k], expected)
        expected = expected & ~dream["ended"][:, k]
    assert dream["alive"][:, 1][:, rows].any() and dream["alive"][:, 3][:, ~rows].any()


def mislead(world, change):
    """from now on `world` predicts what `change` makes of its predictions"""
    honest = world.predict

    def predict(self, *given, **flags):
        return change(honest(*given, **flags))

    world.__class__ = type("Misled", (type(world),), {"predict": predict})


def test_trust_grows_with_the_steps_that_are_right():
    x = experiment(num_envs=16, trust_exact_match=0.9)
    x.env.state.time[::4] = 4  # a quarter of the games end on the way
    w, _, _ = play(x, 8)
    world = TrueWorld(x.env, w.prey[:, 0])
    horizon, figures = hop.trusted_horizon(x.args, x.env.config, world, w, 4)
    assert horizon.tolist() == [4, 4, 4] and all((figures[f"exact_match/{k}"] == 1).all() for k in range(1, 5))
    assert (figures["obs_mse"] == 0).all() and (figures["reward_mse"] == 0).all()
    first = TrueWorld(x.env, w.prey[:, 0])
    mislead(first, lambda p: p if len(first.said) < 3 else p._replace(board=1 - p.board))
    horizon, figures = hop.trusted_horizon(x.args, x.env.config, first, w, 4)
    assert horizon.tolist() == [2, 2, 2] and (figures["exact_match/3"] == 0).all()
    half = torch.arange(16) % 2 == 0
    some = TrueWorld(x.env, w.prey[:, 0])
    mislead(some, lambda p: p._replace(board=torch.where(half.view(1, -1, 1, 1, 1), 1 - p.board, p.board)))
    horizon, figures = hop.trusted_horizon(x.args, x.env.config, some, w, 4)
    assert horizon.tolist() == [0, 0, 0] and (figures["exact_match/1"] == 0.5).all()
    poor = TrueWorld(x.env, w.prey[:, 0])
    mislead(poor, lambda p: p._replace(reward=p.reward + 5))
    horizon, figures = hop.trusted_horizon(x.args, x.env.config, poor, w, 4)
    assert horizon.tolist() == [0, 0, 0] and (figures["exact_match/4"] == 1).all(), "wrong payoffs are not trusted either"


def test_of_many_games_a_thousand_are_measured():
    x = experiment(num_envs=8, trust_exact_match=0.9)
    w = hop.Steps(*(y.repeat_interleave(260, 2) for y in play(x, 8)[0]))  # 2080 games
    world = TrueWorld(x.env, w.prey[:, 0, ::3])
    wrong = torch.arange(694) % 2 == 0
    mislead(world, lambda p: p._replace(board=torch.where(wrong.view(1, -1, 1, 1, 1), 1 - p.board, p.board)))
    _, figures = hop.trusted_horizon(x.args, x.env.config, world, w, 1)
    valid = hop.present_weight(x.env.config, w.board[:, 0, ::3])
    torch.testing.assert_close(figures["exact_match/1"], (valid & ~wrong).sum(1) / valid.sum(1))


def test_learners_with_one_game_each_are_trusted_together():
    x = experiment(num_envs=8, trust_exact_match=0.6)
    w, _, _ = play(x, 8)
    one = hop.Steps(*(f[:, :, :1] for f in w))
    world = TrueWorld(x.env, one.prey[:, 0])
    wrong = torch.tensor([False, True, False]).view(3, 1, 1, 1, 1)
    mislead(world, lambda p: p._replace(board=torch.where(wrong, 1 - p.board, p.board)))
    alone, _ = hop.trusted_horizon(x.args, x.env.config, world, one, 1)
    world.said.clear()
    together, _ = hop.trusted_horizon(x.args, x.env.config, world, one, 1, pooled=True)
    assert alone.tolist() == [1, 0, 1] and together.tolist() == [1, 1, 1]


@pytest.mark.parametrize(("changes", "samples"), [({"trust": False}, True), ({}, False)])
def test_imagination_waits_until_the_world_model_is_good(changes, samples):
    x = experiment(trust_exact_match=1.0, **changes)
    x.replay.push(play(x, 8)[0])
    hop.iterate(x, True, True)
    found = hop.read_totals(x)
    assert (found["wm/horizon"] == (4 if samples else 0)).all() and (found["imagined/samples"] > 0).all() == samples
    assert (found["wm/exact_match/1"] < 1).all()


# ---------------------------------------------------------------------------------------------------------------------
# PPO

ADVANTAGES = [  # returns, ended, alive, expected; gamma = lambda = 0.5, rewards 1 2 4, values 10 20 30 and 40
    ("gae", (0, 0, 0), (1, 1, 1), (1 + 0.25 * (-3 + 0.25 * -6), -3 + 0.25 * -6, -6)),
    ("gae", (0, 1, 0), (1, 1, 1), (1 + 0.25 * -18, -18, -6)),
    ("gae", (0, 0, 0), (1, 1, 0), (1 + 0.25 * -3, -3, 0)),
    ("gae", (1, 0, 0), (1, 0, 0), (-9, 0, 0)),
    ("mc", (0, 0, 0), (1, 1, 1), (8 - 10, 14 - 20, 24 - 30)),
    ("mc", (0, 1, 0), (1, 1, 1), (2 - 10, 2 - 20, 24 - 30)),
    ("mc", (0, 0, 0), (1, 1, 0), (9.5 - 10, 17 - 20, 0)),
    ("mc", (0, 0, 1), (1, 1, 1), (3 - 10, 4 - 20, 4 - 30)),
]


@pytest.mark.parametrize(("returns", "ended", "alive", "expected"), ADVANTAGES)
def test_advantages_by_hand(returns, ended, alive, expected):
    args = args_of(gamma=0.5, gae_lambda=0.5, returns=returns)
    reward, value = torch.tensor([1.0, 2, 4]).view(1, 3, 1), torch.tensor([10.0, 20, 30, 40]).view(1, 4, 1)
    flags = [torch.tensor(x, dtype=torch.bool).view(1, 3, 1) for x in (ended, alive)]
    assert hop.advantages(args, reward, value, *flags).flatten().tolist() == pytest.approx(expected)


@pytest.mark.parametrize("prosocial", [False, True])
def test_real_samples_count_while_their_learner_can_earn(prosocial):
    x = experiment(method="ppo", config=dataclasses.replace(CONFIG, prosocial=prosocial), num_envs=12)
    w, c, _ = play(x, 14)
    batch = hop.real_batch(x, w, c)
    weight, target = (batch[key].unflatten(1, (14, 12)) for key in ("weight", "target"))
    present = w.board[:, :, :, 0].flatten(3).amax(3) > 0
    assert torch.equal(weight > 0, torch.ones_like(present) if prosocial else present) and (~present).any()
    over = w.done & (weight > 0)
    torch.testing.assert_close(target[over], w.reward[..., 0][over])  # nothing beyond the end
    left = w.left[..., 0] & ~w.done
    torch.testing.assert_close(target[left], w.reward[..., 0][left]) if not prosocial else None
    assert left.any() and torch.equal(batch["action"], w.joint[..., 0].flatten(1, 2))
    own = c.log_probs.gather(3, w.joint[..., :1].long()).flatten(1)
    assert torch.equal(batch["log_prob"], own) and (batch["critic_weight"] == batch["weight"]).all()


def real_samples(x, num_steps=16):
    w, c, _ = play(x, num_steps)
    return hop.real_batch(x, w, c)


def improved(x, batch, seed=9, **changes):
    """new weights of a copy of the policy, and the figures"""
    args, policy = dataclasses.replace(x.args, **changes), copy.deepcopy(x.nets.policy)
    found = hop.improve(args, policy, hop.Adam(policy.parameters(), args.learning_rate, CPU), batch, seeded(seed))
    return weights(policy), found


def test_a_learners_update_does_not_depend_on_the_others():
    x = experiment(method="ppo-omg", num_seeds=2)
    batch = real_samples(x)
    before, _ = improved(x, batch)
    changed = {key: value.clone() for key, value in batch.items()}
    for key in ("advantage", "target", "log_prob", "inputs"):
        changed[key][1] = changed[key][1].flip(0) * 3 + 1
    after, _ = improved(x, changed)
    for old, new in zip(before, after, strict=True):
        others = [m for m in range(6) if m != 1]
        assert torch.equal(old[others], new[others])
    assert any((old[1] != new[1]).any() for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize("device", [CPU, pytest.param(torch.device("cuda"), marks=pytest.mark.cuda)])
def test_adam_is_torchs(device):
    """A learning rate that changes, gradients that are clipped, and a parameter that is not always asked"""
    draw = torch.randn(2, 3, 4, generator=seeded(1)), torch.randn(2, 1, 5, generator=seeded(2))
    ours, theirs = ([nn.Parameter(x.clone().to(device)) for x in draw] for _ in range(2))
    mine, target = hop.Adam(ours, 0.1, device, eps=1e-3, beta2=0.9), torch.randn(2, 3, 4, generator=seeded(3)).to(device)
    torchs = torch.optim.Adam(theirs, lr=0.1, betas=(0.9, 0.9), eps=1e-3)

    def loss(p, number):
        return (3 * (p[0] - target).square().sum() + (p[1].square().sum() if number % 2 else 0.0)) / (1 + number)

    for number in range(6):
        rate = 0.1 / (1 + number)
        mine.rate.fill_(rate)
        torchs.param_groups[0]["lr"] = rate
        norms = mine.descend(loss(ours, number), 0.5)
        torchs.zero_grad()
        loss(theirs, number).backward()
        used = [p for p in theirs if p.grad is not None]
        expected = torch.stack([torch.cat([p.grad[m].flatten() for p in used]).norm() for m in range(2)])
        for p in used:
            p.grad *= (0.5 / (expected + 1e-6)).clamp(max=1).view(2, 1, 1)
        torchs.step()
        torch.testing.assert_close(norms, expected)
        for a, b, start in zip(ours, theirs, draw, strict=True):
            torch.testing.assert_close(a, b)
            assert number == 0 or not torch.equal(a.cpu(), start)
    assert [float(x) for x in mine.steps] == [6, 3]


@pytest.mark.parametrize("device", [CPU, pytest.param(torch.device("cuda"), marks=pytest.mark.cuda)])
@pytest.mark.parametrize("changes", [{"method": "ppo"}, {"num_seeds": 2, "wm_ensemble": 2}, {"share_parameters": True}])
def test_what_is_put_back_is_put_in_place(changes, device):
    """A CUDA graph looks for it there."""
    x = experiment(rehearsed=4, device=device, **changes)
    train = x.nets.models is not None
    hop.iterate(x, train, train)
    before = copy.deepcopy(x.tensors())
    kept = [t for name, part in x.tensors().items() if name != "generators" for t in tree_leaves(part) if t.numel()]
    for t in kept:
        t.zero_() if t.any() else t.fill_(1)
    x.generator.manual_seed(0)
    x.env.generator.manual_seed(0)
    assert not same_tree(before["generators"], x.tensors()["generators"])
    x.load(before)
    assert same_tree(before, x.tensors())
    after = [t for name, part in x.tensors().items() if name != "generators" for t in tree_leaves(part) if t.numel()]
    assert [t.data_ptr() for t in after] == [t.data_ptr() for t in kept]


def test_what_does_not_fit_is_not_put_back():
    """copy_ would spread one learner's weights over all of them."""
    x = experiment()
    saved = x.tensors()
    one = {name: {key: t[:1] for key, t in net.items()} for name, net in saved["nets"].items()}
    policy = saved["optimisers"]["policy"]
    for spoiled, error in (
        ({"nets": one}, ValueError),
        ({"env": [*saved["env"], torch.zeros(1)]}, ValueError),
        ({"optimisers": {**saved["optimisers"], "policy": {**policy, "steps": {}}}}, KeyError),
        ({"carry": {**saved["carry"], "more": torch.zeros(1)}}, KeyError),
    ):
        with pytest.raises(error):
            x.load({**saved, **spoiled})


@pytest.mark.parametrize("script", ["hopplus_ppo", "hopplus_mcts"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_a_run_without_compile_does_not_load_the_compiler(device, script, tmp_path):
    """It would take seconds before the first iteration, on some machines six. (Pictures come later.)"""
    flags = f"--device {device} --run-dir {tmp_path} --num-envs 4 --num-steps 8 --total-steps 32 --picture-every 0 "
    flags += "--pretraining-updates 2 --pretraining-games 4 --hidden 8 --wm-hidden 8 --policy-hidden 8 --model-games 2"
    program = (
        f"import sys, stag_hunt_env, {script} as hop\n"
        "hop.draw_pictures = hop.film = lambda *_: None\n"
        f"hop.main(stag_hunt_env.parse(hop.Args, {flags.split()}))\n"
        "sys.exit(' '.join(name for name in ('torch._dynamo', 'torch._inductor') if name in sys.modules) or 0)"
    )
    found = subprocess.run([sys.executable, "-c", program], cwd=Path(hop.__file__).parent, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert list(tmp_path.glob("*/metrics.jsonl"))


def test_advantages_are_normalised_per_learner():
    x = experiment(method="ppo")
    batch = real_samples(x)
    batch["advantage"] = torch.randn(batch["advantage"].shape, generator=seeded(1))
    before, _ = improved(x, batch)
    scale, shift = torch.tensor([[1.0], [100.0], [1.0]]), torch.tensor([[0.0], [50.0], [0.0]])
    after, _ = improved(x, batch | {"advantage": batch["advantage"] * scale + shift})
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(old, new, atol=1e-4, rtol=1e-3)


def test_samples_without_weight_do_not_matter():
    x = experiment(method="ppo-omg")
    batch = real_samples(x)
    off = batch["weight"] == 0
    assert off.any()
    changed = {key: value.clone() for key, value in batch.items()}
    for key in ("advantage", "target", "inputs"):
        changed[key][off] = changed[key][off] * 3 + 1
    changed["action"][off] = 0
    (before, figures), (after, again) = improved(x, batch), improved(x, changed)
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True)) and same_tree(figures, again)


@pytest.mark.parametrize("data", ["real", "mixed"])
def test_critic_learns_from_imagined_samples_only_if_asked_to(data):
    x = experiment(critic_data=data)
    start, alive = starts(x)
    imagined = hop.batch_of(x.args, dream_of(x, start, alive, TrueWorld(x.env, start.prey)), real=False)
    imagined["target"] = imagined["target"] + 10
    after, found = improved(x, imagined, ent_coef=0.0)
    names = [name for name, _ in x.nets.policy.named_parameters()]
    moved = {name.split(".")[0] for name, p, q in zip(names, weights(x.nets.policy), after, strict=True) if (p != q).any()}
    assert moved == ({"actor", "critic"} if data == "mixed" else {"actor"})
    assert (found["value_imagined"] > 1).all() and (found["value_real"] == 0).all()
    assert ((found["value"] > 1) == (data == "mixed")).all()
    real = real_samples(x)
    both = {key: torch.cat([real[key], imagined[key]], 1) for key in real}
    after, found = improved(x, both, update_epochs=1, num_minibatches=1)
    error = 0.5 * (both["value"] - both["target"]).square()
    for name, part in (("value_real", real), ("value_imagined", imagined)):
        own = 0.5 * (part["value"] - part["target"]).square() * part["weight"]
        torch.testing.assert_close(found[name], own.sum(1) / part["weight"].sum(1), atol=1e-4, rtol=1e-3)
    weight = both["weight"] * (both["real"] if data == "real" else 1)
    torch.testing.assert_close(found["value"], (error * weight).sum(1) / weight.sum(1), atol=1e-4, rtol=1e-3)


def test_on_a_cpu_samples_that_do_not_count_are_left_out(monkeypatch):
    alive, number = torch.rand(3, 50, generator=seeded(1)) < 0.4, torch.arange(150).view(3, 50)
    kept, still = hop.living((number, alive), alive)
    assert kept.shape == still.shape == (3, int(alive.sum(1).max()))
    for m in range(3):
        assert kept[m][still[m]].tolist() == number[m][alive[m]].tolist()
    assert hop.living((number,), torch.zeros_like(alive), 4)[0].shape == (3, 4)
    x = experiment(method="ppo-omg", num_envs=16)
    batch, whole = real_samples(x), {"update_epochs": 1, "num_minibatches": 1}
    assert (batch["weight"] == 0).any(1).all()
    new, figures = improved(x, batch, **whole)
    monkeypatch.setattr(hop, "living", lambda tensors, *_: tensors)
    new_of_all, figures_of_all = improved(x, batch, **whole)
    torch.testing.assert_close(new, new_of_all, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(figures, figures_of_all, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("ratio", [0.0, 0.25, 0.5, 0.8, 1.0])
def test_share_of_real_samples_in_the_batch(ratio, monkeypatch):
    x, seen, improve = experiment(ppo_real_ratio=ratio, imagined_weight=0.5, num_envs=8), [], hop.improve
    monkeypatch.setattr(hop, "improve", lambda a, p, o, batch, g: (seen.append(batch), improve(a, p, o, batch, g))[1])
    hop.iterate(x, True, True)
    real, weight = seen[0]["real"], seen[0]["weight"]
    assert float(real.mean()) == pytest.approx(ratio, abs=0.02) and set(weight[real == 0].tolist()) <= {0.0, 0.5}
    assert set(weight[real > 0].tolist()) <= {0.0, 1.0} and len(real[0]) >= 64
    assert ratio == 1 or (weight[real == 0] > 0).any()
    assert (seen[0]["critic_weight"][real == 0] == 0).all()


def test_losses_are_means_over_all_minibatches():
    x = experiment(method="ppo", num_envs=8)
    batch = real_samples(x)
    batch["weight"] = batch["critic_weight"] = torch.ones_like(batch["weight"])
    _, found = improved(x, batch, learning_rate=1e-12, update_epochs=3, num_minibatches=4)
    error = 0.5 * (batch["value"] - batch["target"]).square()
    torch.testing.assert_close(found["value"], error.mean(1), atol=1e-5, rtol=1e-4)
    log_probs, _ = x.nets.policy(batch["inputs"], batch["legal"])
    torch.testing.assert_close(found["entropy"], -(log_probs.exp() * log_probs).sum(2).mean(1).detach())


# ---------------------------------------------------------------------------------------------------------------------
# Figures


@pytest.mark.parametrize("method", ["ppo", "hopplus"])
def test_charts_count_every_finished_game_of_every_seat(method):
    x = experiment(method=method, num_seeds=2, num_envs=5, num_steps=7, seats="learner,random,learner")

    def run():
        for _ in range(3):
            hop.iterate(x, method == "hopplus", method == "hopplus")

    _, log = recorded(x, run)
    total, games = np.zeros((10, 3)), {0: [], 1: []}
    took = np.zeros((10, 3), int)
    for before, actions, reward, done in log:
        after, *_ = x.env.transition(before, actions)
        total += reward.numpy()
        left = (before.present & ~after.present).numpy()
        took[left] = actions.numpy()[left]
        for b in done.nonzero()[:, 0].tolist():
            games[b // 5].append((total[b].copy(), took[b].copy(), int(after.time[b])))
            total[b], took[b] = 0, 0
    assert len(log) == 21
    found = hop.read_totals(x)
    for s in range(2):
        row = hop.log_row(x, found, s)
        returns, prey, length = (np.stack(part) for part in zip(*games[s], strict=True))
        for i in range(3):
            assert row[f"charts/episodic_return/player_{i}"] == pytest.approx(returns[:, i].mean(), rel=1e-5)
        assert row["charts/episodic_return"] == pytest.approx(returns[:, [0, 2]].mean(), rel=1e-5)
        assert row["charts/episodic_length"] == pytest.approx(length.mean(), rel=1e-5)
        assert row["charts/stag_share"] == pytest.approx((prey == HUNT_STAG).mean(), rel=1e-5)
        assert row["charts/hare_share"] == pytest.approx((prey == HUNT_HARE).mean(), rel=1e-5) and (prey > 0).any()
        assert row["charts/nothing_share"] == pytest.approx((prey == 0).mean(), rel=1e-5)
        assert sum(row[f"charts/{name}_share"] for name in ("stag", "hare", "nothing")) == pytest.approx(1)
        gap = returns[:, [0, 2]].mean(0)
        assert row["audit/return_gap"] == pytest.approx(gap.max() - gap.min(), rel=1e-4, abs=1e-6)
        own = found["losses/value"][2 * s : 2 * s + 2]
        assert row["losses/value"] == pytest.approx(own.mean(), rel=1e-5) and own[0] != own[1]
    assert x.totals[(method == "hopplus",) * 2][2] == 0, "the next line starts from nothing"


def test_figures_are_means_over_the_iterations_that_have_them():
    x = experiment()
    hop.iterate(x, True, True)
    first = {name: value.copy() for name, value in hop.read_totals(x).items()}
    assert "losses/world_model" in first and "losses/moa" in first
    x = experiment()
    hop.iterate(x, True, True)
    hop.iterate(x, False, False)
    both = hop.read_totals(x)
    np.testing.assert_allclose(both["losses/world_model"], first["losses/world_model"], rtol=1e-6)
    assert not np.allclose(both["losses/value"], first["losses/value"])


def test_pretraining_learns_from_the_games_that_it_watches(monkeypatch):
    seen, rolled, train, rollout = [], [], hop.train_subgoals, hop.rollout

    def watch(*given, **options):
        rolled.append(rollout(*given, **options))
        return rolled[-1]

    def note(args, env, nets, optimiser, sources, *given, **options):
        (replay, share), newest = sources[0], rolled[-1][0]
        slot = (int(replay.pushed) - 1) % args.replay_rollouts
        same = all(torch.equal(kept[slot], new) for kept, new in zip(replay.steps, newest, strict=True))
        seen.append((int(replay.pushed), share, same))
        return train(args, env, nets, optimiser, sources, *given, **options)

    monkeypatch.setattr(hop, "rollout", watch)
    monkeypatch.setattr(hop, "train_subgoals", note)
    _, games, _ = hop.pretrain(args_of(pretraining_updates=20), [1], CPU)
    assert seen == [(1 + number // 10, 1.0, True) for number in range(20)]
    last = torch.stack([steps.joint for steps, *_ in rolled[-len(games.done) :]])
    assert torch.equal(games.joint, last.unflatten(3, (3, -1)).movedim(3, 2).flatten(1, 2)[:, :, :, :256])


def test_moa_is_measured_at_every_eighth_step(monkeypatch):
    x, thoughts, think = experiment(num_steps=16), [], hop.think
    monkeypatch.setattr(hop, "think", lambda *given: (thoughts.append(think(*given)), thoughts[-1])[1])
    w, c, _ = play(x, 16)
    asked = [t for t, thought in enumerate(thoughts) if thought.expected.shape[3]]
    assert asked == [7, 15] and len(thoughts) == 17
    torch.testing.assert_close(c.expected, torch.stack([thoughts[t].expected.exp() for t in asked], 1))
    there = hop.Steps(*(y[:, asked] for y in w)), c._replace(truth=c.truth[:, asked], bayes=c.bayes[:, asked])
    torch.testing.assert_close(hop.moa_figures(w, c), hop.moa_figures(*there))


def test_moa_figures_are_those_of_a_plain_count():
    generator = np.random.default_rng(1)
    m, t, e, k = 2, 5, 7, 2
    probs = {name: generator.dirichlet(np.ones(7), (m, t, e, k)) for name in ("expected", "truth", "bayes")}
    joint, present = generator.integers(0, 7, (m, t, e, 3)), generator.random((m, t, e, k)) < 0.6
    board = np.zeros((m, t, e, 6, 3, 4), np.uint8)
    board[:, :, :, 1:3, 1, 2] = present
    board[:, :, :, 0, 0, 0] = board[:, :, :, 3:] = 1
    w = steps_of(board=torch.tensor(board), joint=torch.tensor(joint))
    found = hop.moa_figures(w, choices_of(**{name: torch.tensor(p).float() for name, p in probs.items()}))
    for learner in range(m):
        on, action = present[learner], joint[learner, :, :, 1:][present[learner]]
        for name, prefix in (("expected", ""), ("truth", "ceiling/"), ("bayes", "bayes/")):
            p = probs[name][learner][on]
            nll = -np.log(p[np.arange(len(p)), action]).mean()
            assert float(found[f"{prefix}nll"][learner]) == pytest.approx(nll, rel=1e-4)
            assert float(found[f"{prefix}top1"][learner]) == pytest.approx((p.argmax(1) == action).mean(), rel=1e-5)
        p = probs["expected"][learner][on]
        top3 = [a in np.argsort(row)[-3:] for row, a in zip(p, action, strict=True)]
        assert float(found["top3"][learner]) == pytest.approx(np.mean(top3), rel=1e-5)
        confusion, gap = np.zeros((7, 7)), np.zeros(15)
        for row, a in zip(p, action, strict=True):
            confusion[a, row.argmax()] += 1
            gap[int(row.max() * 15)] += row.max() - (row.argmax() == a)
        assert found["confusion"][learner].numpy().tolist() == confusion.tolist()
        assert float(found["ece"][learner]) == pytest.approx(np.abs(gap).sum() / len(p), rel=1e-4)


def test_prey_taken_by_a_plain_count():
    x = experiment(method="ppo-omg", num_envs=16, seats="learner,nearest_hare,nearest_stag")
    w, _, _ = play(x, 10)
    taken = hop.prey_taken(w)
    for e, k in np.ndindex(16, 2):
        first = 0
        for t in range(10):
            if not w.done[0, t, e] and t < 9:
                continue
            caught = [int(w.joint[0, u, e, 1 + k]) - STAY for u in range(first, t + 1) if w.reward[0, u, e, 1 + k] > 0]
            expected = caught[0] if caught else 0 if w.done[0, t, e] else -1
            assert set(taken[0, first : t + 1, e, k].tolist()) == {expected}
            first = t + 1
    assert set(taken.flatten().tolist()) >= {0, 2, -1}


# ---------------------------------------------------------------------------------------------------------------------
# From end to end

TAGS = {
    "ppo": {
        *("charts/episodic_return", "charts/episodic_return/player_2", "charts/stag_share", "charts/hare_share"),
        *("charts/nothing_share", "charts/episodic_length", "charts/SPS", "losses/policy", "losses/value", "losses/entropy"),
        *("losses/approx_kl", "losses/grad_norm", "real/reward_mean", "real/reward_std", "real/return_mean"),
        *("real/value_mean", "losses/value_real", "audit/updates", "audit/return_gap", "audit/real_samples/learner_2"),
        *("time/training", "time/collect", "time/ppo"),
    }
}
TAGS["ppo-omg"] = TAGS["ppo"] | {
    *("moa/top1", "moa/top3", "moa/nll", "moa/ece", "moa/recall/6", "moa/precision/0", "omg/kl", "omg/recon"),
    *("omg/subgoal_norm", "losses/moa", "losses/subgoals", "time/models"),
}
TAGS["hopplus"] = TAGS["ppo-omg"] | {
    *("wm/exact_match/1", "wm/exact_match/4", "wm/obs_mse", "wm/reward_mse", "wm/per_channel_mse/5", "wm/disagreement"),
    *("wm/horizon", "losses/world_model", "imagined/reward_mean", "imagined/return_std", "imagined/value_mean"),
    *("losses/value_imagined", "audit/imagined_samples/learner_0", "time/imagine"),
}


def undefined(figures):
    """names of figures that are no number, except those that may have nothing to count"""
    may_be = ("moa/recall", "moa/precision", "checkpoint")
    return [key for key, value in figures.items() if not key.startswith(may_be) and not math.isfinite(value)]


def run(run_dir, **changes):
    return hop.main(hop.Args(**{**TINY, "run_dir": str(run_dir), **changes}))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """{method: (run_dir, figures)}; pictures only of the full method"""
    found = {}
    for method in hop.METHODS:
        with pytest.MonkeyPatch.context() as patch:
            if method != "hopplus":
                patch.setattr(hop, "draw_pictures", lambda *_: None)
                patch.setattr(hop, "film", lambda *_: None)
            run_dir = tmp_path_factory.mktemp(method)
            found[method] = run_dir, run(run_dir, method=method, num_seeds=2 if method == "hopplus" else 1)
    return found


@pytest.mark.parametrize("method", hop.METHODS)
def test_what_a_run_leaves_behind(method, runs):
    run_dir, figures = runs[method]
    folders = sorted(run_dir.iterdir())
    assert undefined(figures) == [] and figures["checkpoint"] == str(folders[0] / "checkpoint.pt")
    assert len(folders) == (2 if method == "hopplus" else 1)
    for s, folder in enumerate(folders):
        assert folder.name.split("__")[:3] == ["hopplus_ppo", f"3x4_3h1s_3hares_{method}", str(1 + s)]
        saved = json.loads((folder / "args.json").read_text())
        assert saved["method"] == method and saved["config"]["final_time"] == 6
        lines = lines_of(folder)
        assert [(line["iteration"], line["steps"]) for line in lines] == [(1, 32), (2, 64)]
        events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
        tags = set(events.Tags()["scalars"])
        assert tags >= TAGS[method], sorted(TAGS[method] - tags)
        logged = [(event.step, event.value) for event in events.Scalars("losses/value")]
        assert logged == [(line["steps"], pytest.approx(line["losses/value"], rel=1e-5)) for line in lines]
    saved = torch.load(figures["checkpoint"], weights_only=True)
    assert saved["iteration"] == 2 and saved["args"]["method"] == method and not list(run_dir.glob("*/*.part"))
    if method == "hopplus":
        assert {"moa/confusion", "wm/prediction", "omg/subgoals"} <= set(events.Tags()["images"])
        assert {"real/reward", "imagined/return", "imagined/value"} <= set(events.Tags()["histograms"])
        assert (folders[0] / "games.gif").stat().st_size > 1000 and "omg/probe_accuracy" in tags
        means = np.mean([lines_of(folder)[-1]["losses/value"] for folder in folders])
        assert figures["losses/value"] == pytest.approx(means, rel=1e-6)


def test_the_same_seed_gives_the_same_run(runs, tmp_path, no_pictures):
    run_dir, _ = runs["hopplus"]
    torch.manual_seed(77)  # the global generator does not matter
    run(tmp_path / "same", num_seeds=2)
    run(tmp_path / "other", num_seeds=2, seed=5)
    texts = [[without_times(lines_of(f)) for f in sorted(folder.iterdir())] for folder in (run_dir, tmp_path / "same")]
    assert texts[0] == texts[1]
    other = [without_times(lines_of(f)) for f in sorted((tmp_path / "other").iterdir())]
    assert other[0] != texts[0][0] and texts[0][0] != texts[0][1]


WALLS = StagHuntFlags(height=5, width=5, num_players=3, num_hares=3, final_time=6, max_wall_pieces=1)
VARIANTS = {
    "shared": {"share_parameters": True},
    "discrete": {"goal_kind": "discrete"},
    "hindsight": {"subgoals": "hindsight"},
    "hindsight discrete final": {"subgoals": "hindsight", "goal_kind": "discrete", "subgoal_selection": "final"},
    "oracle": {"subgoals": "oracle", "seats": "learner,nearest_stag,mixed"},
    "optimistic": {"subgoal_selection": "optimistic"},
    "final": {"subgoal_selection": "final"},
    "rewarded": {"moa_data": "rewarded"},
    "all": {"moa_data": "all"},
    "pixel": {"wm_head": "pixel", "wm_channel_weights": (2, 2, 2, 1, 1, 1), "imagined_reward_clip": False},
    "pixel prosocial": {"wm_head": "pixel", "config": dataclasses.replace(CONFIG, prosocial=True)},
    "ensemble": {"wm_ensemble": 2, "num_seeds": 2},
    "mc": {"returns": "mc", "critic_data": "mixed", "trust": False},
    "rule-based": {"seats": "nearest_stag,learner,mixed", "share_parameters": True},
    "walls": {"config": WALLS},
    "two players": {
        "config": StagHuntFlags(height=3, width=5, num_players=2, num_hares=2, final_time=6),
        "seats": "learner,learner",
    },
    "no subgoals": {"subgoals": "none"},
    "periods": {"wm_period": 2, "subgoal_period": 3, "total_steps": 128, "log_every": 4},
    "only imagined": {"ppo_real_ratio": 0.0, "critic_data": "mixed", "inter_episode_belief": False},
    "nothing trained": {"wm_updates": 0, "subgoal_updates": 0, "pretraining_updates": 0, "rehearsal": 0.0},
    "no hares": {"config": dataclasses.replace(CONFIG, num_hares=0, num_stags=2, permute_ids=True, steps_after_first_hunt=2)},
    "strengths": {"config": dataclasses.replace(CONFIG, strengths=(1.0, 2.0, 3.0), time_reward=-0.1)},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_variants_run_and_stay_finite(changes, tmp_path, no_pictures):
    figures = run(tmp_path, **changes)
    assert undefined(figures) == []
    assert figures["imagined/samples"] > 0 and figures["audit/updates"] > 0
    expected = {"losses/world_model", "losses/moa"} if changes.get("wm_updates", 1) else set()
    assert expected <= set(figures)
    nets = torch.load(figures["checkpoint"], weights_only=True)["tensors"]["nets"]
    assert all(tensor.isfinite().all() for net in nets.values() for tensor in net.values())


PICTURED = {
    "discrete": {"goal_kind": "discrete", "share_parameters": True, "wm_head": "pixel"},
    "oracle": {"subgoals": "oracle", "seats": "learner,nearest_hare,nearest_hare", "num_steps": 64, "num_envs": 16},
    "one number": {"goal_dim": 1, "num_steps": 16},
}


@pytest.mark.parametrize("changes", PICTURED.values(), ids=PICTURED)
def test_pictures_of_every_kind_of_subgoal(changes, tmp_path, capsys):
    figures = run(tmp_path, **{"total_steps": 32, **changes})
    assert undefined(figures) == [] and list(tmp_path.glob("*/games.gif"))
    events = EventAccumulator(str(Path(figures["checkpoint"]).parent)).Reload()
    assert "could not" not in capsys.readouterr().out and "omg/subgoals" in events.Tags()["images"]


def test_a_linear_reading_of_subgoals_that_add_up_to_one(monkeypatch):
    """2^17 samples of each kind, as many as a long run has: next to them a ridge vanishes in single precision."""
    x, shape = experiment(method="ppo-omg"), (1, 64, 4096)
    board, joint = torch.ones(*shape, 6, 1, 1, dtype=torch.uint8), torch.zeros(*shape, 3, dtype=torch.uint8)
    w = hop.Steps(**{**dict.fromkeys(hop.Steps._fields, torch.zeros(shape)), "board": board, "joint": joint})
    monkeypatch.setattr(hop, "prey_taken", lambda _: torch.tensor([1, 2]).expand(*shape, 2))
    goals = torch.eye(2, 5).expand(*shape, 2, 5)  # who sits there, as the oracle tells it
    x.last = {"steps": w, "choices": choices_of(goals=goals.flatten(3))}
    told = {}

    class Writer:
        add_scalar = staticmethod(lambda key, value, step: told.update({key: value}))
        add_figure = staticmethod(lambda key, figure, step: told.update({key: figure}))

    hop.draw_subgoals(x, slice(0, 1), Writer, 0)
    assert told["omg/probe_accuracy"] == 1, "g tells who is who, and each takes another prey"
    hop.pyplot().close(told["omg/subgoals"])


class DiskFull:
    """A writer of TensorBoard events that cannot write"""

    def __init__(self, *_, **__):
        pass

    def fail(self, *_, **__):
        raise OSError("no space left\non device")

    add_scalar = add_histogram = add_figure = add_image = close = fail


FAILING = {
    "drawing": ("draw_table", "could not draw"),
    "filming": ("write_gif", "could not film"),
    "TensorBoard": ("SummaryWriter", "could not write to TensorBoard"),
}


@pytest.mark.parametrize(("name", "said"), FAILING.values(), ids=FAILING)
def test_what_cannot_be_drawn_costs_nothing(name, said, tmp_path, monkeypatch, capsys):
    changes = {"picture_every": 1, "total_steps": 96}
    with monkeypatch.context() as patch:
        for part in ("draw_pictures", "film"):
            patch.setattr(hop, part, lambda *_: None)
        whole = run(tmp_path / "whole", **changes)

    def fails(*_, **__):
        raise RuntimeError("singular\nin two lines")

    monkeypatch.setattr(hop, name, DiskFull if name == "SummaryWriter" else fails)
    capsys.readouterr()
    figures = run(tmp_path / "failing", **changes)
    lines = [line for line in capsys.readouterr().out.splitlines() if "could not" in line]
    error = "OSError: no space left on device" if name == "SummaryWriter" else "RuntimeError: singular in two lines"
    assert f"{said}: {error}; the run goes on" in lines
    first, second = (torch.load(path.pop("checkpoint"), weights_only=True) for path in (whole, figures))
    assert second["iteration"] == 3 and same_tree(first["tensors"], second["tensors"])
    assert figures == pytest.approx(whole, rel=0, abs=0, nan_ok=True)


def test_checkpoints_are_saved_before_anything_is_drawn(tmp_path, monkeypatch):
    done, save = [], hop.save_atomically
    monkeypatch.setattr(hop, "save_atomically", lambda path, content: (done.append("save"), save(path, content)))
    monkeypatch.setattr(hop, "draw_pictures", lambda *_: done.append("draw"))
    monkeypatch.setattr(hop, "film", lambda *_: done.append("film"))
    run(tmp_path, picture_every=2, save_every=2, total_steps=4 * 32)
    assert done == ["save", "draw", "save", "draw", "film"]


@pytest.mark.parametrize("changes", [{}, {"goal_kind": "discrete", "wm_head": "pixel", "seats": "learner,mixed,learner"}])
def test_no_cast_depends_on_the_machine(changes, tmp_path):
    with NoNonFiniteCasts() as seen:
        run(tmp_path, total_steps=32, **changes)
    assert seen.casts > 0


def test_casts_that_depend_on_the_machine_are_noticed():
    with NoNonFiniteCasts() as seen:
        assert torch.tensor([-0.9, 255.9]).to(torch.uint8).tolist() == [0, 255] and seen.casts == 1
        torch.tensor([math.nan]).double()
        for value, dtype in ((math.nan, torch.int64), (math.inf, torch.int32), (256.0, torch.uint8), (-1.0, torch.uint8)):
            with pytest.raises(AssertionError, match="no torch"):
                torch.tensor([value]).to(dtype)
            with pytest.raises(AssertionError, match="no torch"):
                torch.zeros(1, dtype=dtype)[:] = torch.tensor([value])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize(
    "changes", [{"method": "ppo"}, {"wm_period": 2, "subgoal_period": 3, "seats": "learner,mixed,learner"}]
)
def test_resumed_run_is_the_same_bit_for_bit(changes, device, tmp_path, monkeypatch, no_pictures):
    changes = {**changes, "device": device, "total_steps": 6 * 32, "num_seeds": 2}
    whole = run(tmp_path / "whole", **changes)
    save, calls = hop.save_atomically, []

    def killed_at_the_second(path, content):
        calls.append(path)
        if len(calls) == 2:  # its lines are already in metrics.jsonl, its checkpoint is not
            raise KeyboardInterrupt
        save(path, content)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(hop, "save_atomically", killed_at_the_second)
        run(tmp_path / "killed", **changes)
    (checkpoint,) = (tmp_path / "killed").glob("*/checkpoint.pt")
    assert len(lines_of(checkpoint.parent)) == 4 and torch.load(checkpoint, weights_only=True)["iteration"] == 2
    resumed = hop.main(hop.Args(resume=str(checkpoint), device=device, seed=77))
    assert resumed.pop("checkpoint") == str(checkpoint)
    first, second = (torch.load(path, weights_only=True) for path in (whole.pop("checkpoint"), checkpoint))
    for key in first["tensors"]:
        assert same_tree(first["tensors"][key], second["tensors"][key]), key
    assert resumed == pytest.approx(whole, rel=0, abs=0, nan_ok=True) and second["iteration"] == 6
    lines = [[without_times(lines_of(f)) for f in sorted((tmp_path / d).iterdir())] for d in ("whole", "killed")]
    assert lines[0] == lines[1] and [line["iteration"] for line in lines[1][0]] == [1, 2, 3, 4, 5, 6]


POISONED = [("policy", "losses/policy"), ("world", "losses/world_model"), ("moa", "losses/moa")]


@pytest.mark.parametrize(("part", "quantity"), POISONED)
def test_not_a_number_stops_the_run(part, quantity, tmp_path, monkeypatch, no_pictures):
    iterate, calls = hop.iterate, []

    def poisoned(x, *key):
        calls.append(part)
        if len(calls) == 3:
            net = {"policy": x.nets.policy.actor, "world": x.nets.world, "moa": x.nets.models.moa}[part]
            with torch.no_grad():
                weight = list(net.parameters())[-2].view(-1)
                (weight[:1] if part == "policy" else weight).fill_(math.nan)
        return iterate(x, *key)

    monkeypatch.setattr(hop, "iterate", poisoned)
    with pytest.raises(FloatingPointError, match=quantity) as error, NoNonFiniteCasts() as seen:
        run(tmp_path, total_steps=5 * 32)
    assert seen.casts > 0
    (bad,) = tmp_path.glob("*/checkpoint_bad.pt")
    assert str(bad) in str(error.value) and len(calls) == 3 and "\n" not in str(error.value)
    good = torch.load(bad.parent / "checkpoint.pt", weights_only=True)  # the one before is not overwritten
    for saved, fine in ((good, True), (torch.load(bad, weights_only=True), False)):
        tensors = [t for net in saved["tensors"]["nets"].values() for t in net.values()]
        assert all(bool(t.isfinite().all()) for t in tensors) == fine
    assert good["iteration"] == 2 and len(lines_of(bad.parent)) == 2


def test_every_flag_is_read():
    source = Path(hop.__file__).read_text()
    _, before, body = re.split(r"^class Args:$|^# -{10,}$", source, maxsplit=2, flags=re.M)
    assert "imagined_reward_clip: bool" in before and "class StackedLinear" in body
    for field in dataclasses.fields(hop.Args):
        by_name = rf"\b(args|source|trained|plain|saved)\.{field.name}\b"
        assert re.search(by_name, body), f"--{field.name.replace('_', '-')} is read nowhere"


def test_every_flag_has_a_help_text():
    source = Path(hop.__file__).read_text()
    for field in dataclasses.fields(hop.Args):
        if field.name != "config":
            line = source.split(f"    {field.name}: ", 1)[1].split("\n", 2)[1]
            assert line.startswith('    """') and len(line) > 15, field.name


# ---------------------------------------------------------------------------------------------------------------------
# A trained learner among others


@pytest.fixture
def trained(runs, tmp_path, no_pictures):
    """{method: checkpoint}, copies"""
    found = {}
    for method, (_, figures) in runs.items():
        found[method] = tmp_path / method / "checkpoint.pt"
        found[method].parent.mkdir()
        found[method].write_bytes(Path(figures["checkpoint"]).read_bytes())
    return found


@pytest.mark.parametrize(("method", "seats"), [("ppo", "learner,nearest_hare,mixed"), ("hopplus", LEARNERS)])
def test_evaluation_plays_the_frozen_learners(method, seats, trained, monkeypatch):
    rollout, sums = hop.rollout, []

    def watched(*args, **more):
        found = rollout(*args, **more)
        if args[6] > 1:
            sums.append(found[2])
        return found

    monkeypatch.setattr(hop, "rollout", watched)
    path = trained[method]
    found = run(path.parent / "runs", evaluate=str(path), eval_games=300, seats=seats)
    rows = list(csv.DictReader((path.parent / "evaluation.csv").open()))
    total, games = (sum(s[key] for s in sums) for key in ("return", "games"))
    assert [row["player"] for row in rows] == seats.split(",") and (games == 512).all()  # 2 in each of 256 places
    for i, row in enumerate(rows):
        expected = float((total[:, i] / games[:, i]).mean())
        assert (
            found[f"return/player_{i}"] == pytest.approx(expected, rel=1e-5) == pytest.approx(float(row["return"]), rel=1e-5)
        )
    assert not (path.parent / "runs").exists()


def test_nothing_is_remembered_of_players_who_are_drawn_anew():
    flags = {"inter_episode_belief": True, "memory_discount": 0.5}
    assert hop.memory(hop.resolved(hop.Args(**flags))) == 0.5
    assert hop.memory(hop.resolved(hop.Args(**flags, seats="learner,mixed,random,random"))) == 0.0


def test_short_games_do_not_count_more_often():
    x = experiment(method="ppo", num_envs=64)
    _, _, sums = hop.rollout(x.args, x.env, x.seating, x.nets, x.carry, x.generator, 24, games_each=2)
    lengths = x.carry["played"]
    assert (sums["games"] == 128).all() and lengths.min() >= 2 and lengths.max() > 2


def test_nobody_to_evaluate(trained):
    with pytest.raises(ValueError, match="no learner"):
        run("unused", evaluate=str(trained["ppo"]), seats="random,random,random")


def test_evaluation_needs_only_the_checkpoint(trained):
    found = hop.main(hop.Args(evaluate=str(trained["ppo"]), eval_games=8, device="cpu"))
    assert len(found) == 3


def test_evaluated_learners_are_those_who_sat_there(trained, monkeypatch):
    transplant, seen = hop.transplant, []

    def watched(x, saved, index):
        transplant(x, saved, index)
        seen.append(
            (weights(x.nets.policy), [saved["tensors"]["nets"]["policy"][n] for n, _ in x.nets.policy.named_parameters()])
        )

    monkeypatch.setattr(hop, "transplant", watched)
    run("unused", evaluate=str(trained["hopplus"]), eval_games=2, seats="random,learner,learner")
    for ours, saved in zip(*seen[0], strict=True):
        assert torch.equal(ours, saved[[1, 2, 4, 5]])


ADAPT = {"adapt_steps": 32, "adapt_every": 8, "adapt_repetitions": 6, "adapt_games": 4, "adapt_rounds": 1}


@pytest.mark.parametrize("method", ["ppo", "hopplus"])
def test_adaptation(method, trained, monkeypatch):
    transplant, make_seating, seen, seats = hop.transplant, hop.make_seating, [], []

    def watched(x, saved, index):
        transplant(x, saved, index)
        for name, p in x.nets.policy.named_parameters():
            expected = saved["tensors"]["nets"]["policy"][name]
            order = [0, 1, 2] * 2 if method == "ppo" else [0, 1, 2, 3, 4, 5]  # two repetitions, or two seeds, per seat
            assert torch.equal(p, expected[order])
        seen.append(index)

    def watched_seating(kinds, *rest):
        seats.append(kinds)
        return make_seating(kinds, *rest)

    monkeypatch.setattr(hop, "transplant", watched)
    monkeypatch.setattr(hop, "make_seating", watched_seating)
    path = trained[method]
    flags = {**ADAPT, "seats": "learner,nearest_hare,random", "adapt_references": False}
    found = run(path.parent / "runs", adapt=str(path), **flags)
    learner, hare, at_random = hop.seat_kinds(["learner", "nearest_hare", "random"])
    for r, kinds in enumerate(seats[0]):
        assert [kinds[(r + k) % 3] for k in range(3)] == [learner, hare, at_random]
    assert len(seen) == 2 and len(seats[0]) == 6
    assert set(found) == {"frozen/nearest_hare + random", "learning/nearest_hare + random"}
    assert all(math.isfinite(value) and 0 <= value <= 5 for value in found.values())
    (row,) = csv.DictReader((path.parent / "adaptation.csv").open())
    assert float(row["frozen mean"]) == pytest.approx(found["frozen/nearest_hare + random"])
    assert (path.parent / "adaptation.png").exists() and (path.parent / "adaptation_curve.csv").exists()
    assert not (path.parent / "runs").exists()


def test_co_players_are_learned_while_adapting(trained, monkeypatch):
    train, seen = hop.train_subgoals, []
    monkeypatch.setattr(hop, "train_subgoals", lambda *args: (seen.append(args[7]), train(*args))[1])
    run("unused", adapt=str(trained["ppo-omg"]), seats="learner,random,random", adapt_references=False, **ADAPT)
    assert seen == [2] * 4


def test_adaptation_beside_references(trained, monkeypatch):
    monkeypatch.setattr(hop, "best_responses", lambda args, source, sets, device: [2.0] * len(sets))
    flags = {**ADAPT, "seats": "nearest_hare,learner,nearest_stag"}
    found = run("unused", adapt=str(trained["ppo-omg"]), **flags)
    assert {key.split("/")[0] for key in found} == {"frozen", "learning", "random", "best response"}
    (row,) = csv.DictReader((trained["ppo-omg"].parent / "adaptation.csv").open())
    low = found["random/nearest_stag + nearest_hare"]
    expected = (found["frozen/nearest_stag + nearest_hare"] - low) / (2 - low)
    assert float(row["frozen normalised"]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("learn", [False, True])
def test_only_learners_who_may_learn_change(learn):
    x = experiment(method="ppo", num_envs=1, num_steps=16, seats="learner,nearest_hare,nearest_hare")
    before = weights(x.nets.policy)
    curve, _ = hop.meet(x.args, x, None, 3, learn)
    changed = any((p != q).any() for p, q in zip(before, weights(x.nets.policy), strict=True))
    assert changed == learn and curve.shape == (3, 1, 2) and (curve[:, :, 1] >= 2).all()


@pytest.mark.parametrize("better", ["before", "learned", "each"])
def test_a_learned_moa_is_used_where_it_foretold_better(better, monkeypatch):
    """Two learners; on the newest steps the new MOA is worse, better, or better for the second learner alone."""
    flags = {"num_seeds": 2, "num_envs": 1, "num_steps": 8, "seats": "learner,random,nearest_hare", "subgoal_updates": 1}
    x = experiment(method="ppo-omg", **flags)
    moa, inference, before = x.nets.models.moa, weights(x.nets.models.inference), weights(x.nets.models.moa)
    losses, calls, learned = hop.subgoal_losses, [], []

    def judged(args, env, nets, w, eps, generator, pretraining):
        if torch.is_grad_enabled():
            return losses(args, env, nets, w, eps, generator, pretraining)
        calls.append(weights(moa))
        new = len(calls) % 2 == 0  # first the MOA that the learner came with, then the learned one
        gain = {"before": [-1.0, -1.0], "learned": [1.0, 1.0], "each": [-1.0, 1.0]}[better]
        return {"moa": torch.tensor([2.0, 2.0]) - new * torch.tensor(gain)}

    train = hop.train_subgoals
    monkeypatch.setattr(hop, "subgoal_losses", judged)
    monkeypatch.setattr(hop, "train_subgoals", lambda *args: (train(*args), learned.append(weights(moa)))[0])
    _, figures = hop.meet(x.args, x, None, 3, True)
    used = {"before": [False, False], "learned": [True, True], "each": [False, True]}[better]
    for ours, old, new in zip(weights(moa), before, learned[-1], strict=True):
        assert torch.equal(ours, torch.where(torch.tensor(used).view(2, *[1] * (old.dim() - 1)), new, old))
    assert figures["MOA changed"].tolist() == [float(u) for u in used]
    assert all(torch.equal(a, b) for a, b in zip(inference, weights(x.nets.models.inference), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(calls[0], before, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(calls[-1], learned[-2], strict=True)), "judged before it sees the steps"


def test_learned_weights_are_used_where_they_earn_two_standard_errors_more(monkeypatch):
    """Two learners; in imagination the new weights earn 1.7 and 2.8 standard errors more than those they came with."""
    flags = {"num_seeds": 2, "num_envs": 1, "num_steps": 8, "seats": "learner,random,nearest_hare", "subgoal_updates": 0}
    x = experiment(adapt_games=64, adapt_rounds=1, **flags)
    x.replay.push(play(x, 8)[0])
    boards = hop.first_boards({"tensors": x.tensors()}, torch.tensor([0, 1]), CPU, 8)
    imagine, before, learned = hop.imagine, weights(x.nets.policy), []

    def judged(*given):
        found = imagine(*given)
        new = any((p != q).any() for p, q in zip(before, weights(x.nets.policy), strict=True))
        learned.append(weights(x.nets.policy)) if new else None
        found["reward"] = torch.zeros_like(found["reward"])
        found["reward"][:, 0] = torch.tensor([1.0, -1.0]).repeat(32) + torch.tensor([[0.3], [0.5]]) * new
        found["alive"] = torch.ones_like(found["alive"])
        return found

    monkeypatch.setattr(hop, "imagine", judged)
    _, figures = hop.meet(x.args, x, boards, 1, True)
    assert figures["changed"].tolist() == [0.0, 1.0]
    for ours, old, new in zip(weights(x.nets.policy), before, learned[-1], strict=True):
        assert torch.equal(ours[0], old[0]) and torch.equal(ours[1], new[1])
    assert figures["imagined return"] == pytest.approx([0.0, 0.5], abs=1e-6)


def test_first_boards_are_boards_of_real_games():
    x = experiment(rehearsed=0, replay_rollouts=3)
    x.replay.push(play(x, 8)[0])
    boards = hop.first_boards({"tensors": x.tensors()}, torch.tensor([2, 0, 0]), CPU, 50)
    assert (boards.time == 0).all() and boards.board.shape[:2] == (3, 50)
    assert (boards.board[:, :, :3].flatten(3).sum(3) == 1).all()


# ---------------------------------------------------------------------------------------------------------------------
# Models from elsewhere, and what is refused


@pytest.fixture(scope="module")
def files(runs, tmp_path_factory):
    """{name: path}"""
    folder = tmp_path_factory.mktemp("files")
    paths = {"missing": folder / "missing", "text": folder / "text", "checkpoint": runs["hopplus"][1]["checkpoint"]}
    paths["text"].write_text("hello\n")
    with pytest.MonkeyPatch.context() as patch:
        probe = vae.probe
        patch.setattr(vae, "draw", lambda *_: None)
        patch.setattr(vae, "probe", lambda *args: probe(*args, steps=2))
        for name in ("draw_cases", "draw_summary"):
            patch.setattr(wm, name, lambda *_: None)
        common = {"device": "cpu", "held_out_games": 8, "run_dir": str(folder / "runs")}
        small = {**common, "num_samples": 300, "epochs": 1, "hidden": 8, "goal_dim": 5, "num_goals": 5}
        paths["vae"] = vae.main(vae.Args(**small, num_seeds=2, config=CONFIG))["checkpoint"]
        small = {**common, "num_transitions": 300, "num_updates": 2, "log_every": 1, "wm_hidden": 16}
        paths["world"] = wm.main(wm.Args(**small, wm_ensemble=2, config=CONFIG))["checkpoint"]
    for name in ("vae", "world", "checkpoint"):
        content = Path(paths[name]).read_bytes()
        paths[f"cut {name}"] = folder / f"cut {name}"
        paths[f"cut {name}"].write_bytes(content[: len(content) // 2])
    paths["abacus"] = folder / "abacus"
    hop.save_atomically(paths["abacus"], torch.load(paths["checkpoint"], weights_only=True) | {"device": "abacus"})
    return {name: str(path) for name, path in paths.items()}


def test_learners_start_from_the_checkpoints(files, tmp_path, no_pictures):
    flags = {"vae_checkpoint": files["vae"], "world_model_checkpoint": files["world"], "wm_ensemble": 2, "num_seeds": 3}
    figures = run(tmp_path, **flags, total_steps=32, subgoal_updates=0, wm_updates=0)
    nets = torch.load(figures["checkpoint"], weights_only=True)["tensors"]["nets"]
    subgoals, world = (torch.load(files[name], weights_only=True)["model"] for name in ("vae", "world"))
    for key, value in subgoals.items():  # 3 seeds of 3 learners, from 2 seeds
        assert torch.equal(nets["models"][key], value[[0] * 3 + [1] * 3 + [0] * 3]), key
    for key, value in world.items():  # ensembles of 2
        assert torch.equal(nets["world"][key], value[[0, 1] * 9]), key


OTHER_BOARD = dataclasses.replace(CONFIG, height=4, num_hares=2)
MORE = {"wm_head": "pixel", "wm_ensemble": 1}
REFUSED = [  # flags ("{...}" stands for a file), what the error must name
    ({"seats": "learner,learner,nearest_wolf"}, ["nearest_wolf"]),
    ({"seats": "learner,learner"}, ["2 seats", "3 players"]),
    ({"seats": "random,random,mixed"}, ["nobody learns"]),
    ({"ppo_real_ratio": 0.0}, ["--ppo-real-ratio 0", "--critic-data mixed"]),
    ({"imagination_horizon": 50}, ["--imagination-horizon 50", "--num-steps"]),
    ({"method": "ppo", "inter_episode_belief": True}, ["--inter-episode-belief"]),
    ({"adapt": "{checkpoint}", "adapt_steps": 30, "adapt_every": 20}, ["--adapt-steps 30", "--adapt-every 20"]),
    ({"share_parameters": True, "config": dataclasses.replace(CONFIG, strengths=(1.0, 2.0, 3.0))}, ["--strengths"]),
    ({"resume": "{checkpoint}", "evaluate": "{checkpoint}"}, ["--resume", "--evaluate", "exclude"]),
    ({"adapt": "{checkpoint}", "evaluate": "{checkpoint}"}, ["--adapt", "--evaluate", "exclude"]),
    ({"subgoals": "oracle", "goal_dim": 2}, ["oracle", "5", "2"]),
    ({"subgoals": "bayes"}, ["bayes", "--goal-kind discrete", "--num-goals 2"]),
    ({"subgoals": "bayes", "goal_kind": "discrete", "num_goals": 2, "vae_checkpoint": "{vae}"}, ["bayes", "VAE checkpoint"]),
    ({"forget": 1.5}, ["--forget", "1.5"]),
    ({"wm_channel_weights": (1.0,) * 6}, ["--wm-channel-weights", "pixel"]),
    ({"wm_head": "pixel", "wm_channel_weights": (1.0, 2.0)}, ["6", "2"]),
    ({"config": dataclasses.replace(CONFIG, prosocial=True)}, ["--prosocial", "pixel"]),
    ({"learning_rate": -1e-3}, ["--learning-rate", "-0.001"]),
    ({"max_grad_norm": math.nan}, ["--max-grad-norm", "nan"]),
    ({"kl_coef": -1.0}, ["--kl-coef", "-1.0"]),
    ({"gamma": math.nan}, ["--gamma", "nan"]),
    ({"num_envs": 0}, ["--num-envs", "0"]),
    ({"subgoal_updates": -1}, ["--subgoal-updates", "-1"]),
    ({"picture_every": -1}, ["--picture-every", "-1"]),
    ({"ppo_real_ratio": 2.0}, ["--ppo-real-ratio", "2.0"]),
    ({"num_minibatches": 33}, ["33 minibatches", "32"]),
    ({"config": StagHuntFlags(height=2, width=2)}, ["2x2"]),
    ({"config": dataclasses.replace(CONFIG, height=16, width=17)}, ["255"]),
    ({"method": "ppo", "vae_checkpoint": "{vae}"}, ["--vae-checkpoint", "ppo"]),
    ({"method": "ppo-omg", "world_model_checkpoint": "{world}"}, ["--world-model-checkpoint", "--imagination"]),
    *(({flag: "{missing}"}, ["there is no", "missing"]) for flag in ("resume", "evaluate", "adapt")),
    *(({flag: "{cut checkpoint}"}, ["cut short", "bytes"]) for flag in ("resume", "evaluate", "adapt")),
    *(({flag: "{vae}"}, ["subgoals-2", "hopplus-5"]) for flag in ("resume", "evaluate", "adapt")),
    ({"resume": "{text}"}, ["readable"]),
    ({"resume": "{abacus}"}, ["abacus", "cpu"]),
    ({"adapt": "{checkpoint}", "seats": "learner,mixed,random"}, ["--adapt", "one learner"]),
    ({"vae_checkpoint": "{missing}"}, ["VAE checkpoint", "missing"]),
    ({"vae_checkpoint": "{cut vae}"}, ["cut short"]),
    ({"vae_checkpoint": "{world}"}, ["world-model-3", "subgoals-2"]),
    ({"vae_checkpoint": "{vae}", "config": OTHER_BOARD}, ["height 3", "4", "num_hares 3", "2"]),
    ({"vae_checkpoint": "{vae}", "hidden": 9}, ["hidden 8", "9"]),
    ({"world_model_checkpoint": "{missing}"}, ["world-model checkpoint", "missing"]),
    ({"world_model_checkpoint": "{cut world}"}, ["cut short"]),
    ({"world_model_checkpoint": "{checkpoint}"}, ["hopplus-5", "world-model-3"]),
    ({"world_model_checkpoint": "{world}", **MORE}, ["wm_head structured", "pixel", "wm_ensemble 2", "1"]),
]


@pytest.mark.parametrize(("flags", "words"), REFUSED, ids=[" ".join(map(str, f.items()))[:60] for f, _ in REFUSED])
def test_refused_before_anything_is_written(flags, words, files, tmp_path):
    flags = {k: v.format_map(files) if isinstance(v, str) else v for k, v in flags.items()}
    before = sorted(Path(files["checkpoint"]).parent.rglob("*"))
    with pytest.raises(ValueError) as error:
        run(tmp_path / "runs", **flags)
    message = str(error.value)
    assert "\n" not in message and all(word in message for word in words), message
    assert not (tmp_path / "runs").exists() and sorted(Path(files["checkpoint"]).parent.rglob("*")) == before


def test_a_seat_that_never_learned_cannot_be_evaluated(tmp_path, no_pictures):
    figures = run(tmp_path, method="ppo", seats="learner,random,random", total_steps=32)
    with pytest.raises(ValueError, match="seat 1 was not a learner"):
        run("unused", evaluate=figures["checkpoint"], seats="random,learner,random", eval_games=2)


@pytest.mark.parametrize("learning", [False, True])
@pytest.mark.parametrize("stags", [1, 2])
def test_encoders_add_up_players_and_take_the_largest_of_prey(stags, learning):
    config = dataclasses.replace(helpers.TINY_CONFIG, num_stags=stags)
    x, seen = experiment(config=config), []
    encoder, cells = x.nets.models.moa.encoder, x.env.config.num_cells
    things = torch.randint(cells + 1, (3, 200, 3 + x.env.config.num_prey), generator=seeded(1))  # the last cell: nowhere
    encoder.mix.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    with torch.set_grad_enabled(learning):
        encoder(things, torch.zeros(3, 200, 1))
    rows = encoder.lookup[encoder.kind, things[..., :1], things]
    vectors, nothing = encoder.table[torch.arange(3)[:, None, None], rows], encoder.table[:, -1:]
    prey = (torch.maximum(part.amax(2), nothing) for part in vectors[:, :, 3:].split([stags, x.env.config.num_hares], 2))
    torch.testing.assert_close(seen[0], torch.cat([vectors[:, :, :3].sum(2), *prey], 2))


# ---------------------------------------------------------------------------------------------------------------------
# On a GPU, and what can be checked of it without one


@pytest.mark.parametrize(("rows", "outputs"), [(1, 7), (1000, 16), (3000, 1), (4096, 7)])
def test_products_in_parts_are_the_same(rows, outputs):
    generators = [torch.Generator().manual_seed(seed) for seed in (1, 2, 3)]
    layer, found = hop.StackedLinear(generators, 12, outputs).double(), []
    x = torch.randn(3, rows, 12, generator=generators[0], dtype=torch.float64)
    for product in (hop.in_parts, lambda rows, weight, bias: rows @ weight + bias):
        out = product(x, layer.weight, layer.bias)
        found.append((out, *torch.autograd.grad(out.square().sum(), (layer.weight, layer.bias))))
    torch.testing.assert_close(*found)
    torch.testing.assert_close(layer(x.unflatten(1, (rows, 1))).squeeze(2), found[0][0])


class Touched(TorchDispatchMode):
    """which memory is read and which is written"""

    def __init__(self):
        super().__init__()
        self.read, self.written, self.kept = set(), set(), []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs, schema = kwargs or {}, function._schema
        given = [args[i] if i < len(args) else kwargs.get(a.name) for i, a in enumerate(schema.arguments)]
        out = function(*args, **kwargs)
        is_view = all(r.alias_info for r in schema.returns) and not any(
            a.alias_info and a.alias_info.is_write for a in schema.arguments
        )
        for argument, value in zip(schema.arguments, given, strict=True):
            for tensor in tree_leaves(value):
                if isinstance(tensor, torch.Tensor) and not is_view:
                    writes = argument.alias_info is not None and argument.alias_info.is_write
                    (self.written if writes else self.read).add(tensor.untyped_storage().data_ptr())
        self.kept += [
            x.untyped_storage() for x in tree_leaves((given, out)) if isinstance(x, torch.Tensor)
        ]  # no address twice
        return out


BAYES = {"subgoals": "bayes", "goal_kind": "discrete", "num_goals": 2}


@pytest.mark.parametrize("changes", [{}, {"subgoals": "hindsight"}, {"wm_head": "pixel"}, BAYES])
def test_what_trains_side_by_side_shares_nothing_that_changes(changes, monkeypatch):
    """On a GPU the two run on two streams."""
    x, found = experiment(rehearsed=4, **changes), []
    x.rehearsed.pushed.fill_(x.args.replay_rollouts)
    hop.iterate(x, True, True)

    def one_by_one(one, other, device):
        results = []
        for function in (one, other):
            with Touched() as touched:
                results.append(function())
            found.append(touched)
        return tuple(results)

    monkeypatch.setattr(hop, "side_by_side", one_by_one)
    kept = {t.untyped_storage().data_ptr() for t in tree_leaves(x.tensors()) if t.numel()}
    hop.learn_models(x, True, True)
    world, subgoals = found
    assert not world.written & kept & (subgoals.read | subgoals.written)
    assert not subgoals.written & kept & (world.read | world.written)
    weights = [{p.untyped_storage().data_ptr() for p in net.parameters()} for net in (x.nets.world, x.nets.models.moa)]
    assert weights[0] <= world.written and weights[1] <= subgoals.written
    assert x.replay.steps.board.untyped_storage().data_ptr() in world.read & subgoals.read


def test_pretraining_keeps_what_a_captured_graph_writes_over(monkeypatch):
    def in_place(function, generators, use):
        kept = []

        def call():
            result = function()
            if not kept:
                kept.append(result)
            for old, new in zip(tree_leaves(kept[0]), tree_leaves(result), strict=True):
                if isinstance(new, torch.Tensor):
                    old.copy_(new)
            return kept[0]

        return call

    args, found = args_of(pretraining_updates=20, num_seeds=2), []
    for graphed in (hop.graphed, in_place):
        monkeypatch.setattr(hop, "graphed", graphed)
        found.append(hop.pretrain(args, [1, 2], CPU))
    (weights, games, figures), (others, same_games, same_figures) = found
    assert same_tree(weights, others) and figures == same_figures
    assert all(torch.equal(a, b) for a, b in zip(games, same_games, strict=True))


@pytest.mark.parametrize("changes", [{}, {"wm_head": "pixel"}, {"goal_kind": "discrete"}, {"subgoals": "none"}, BAYES])
def test_bfloat16_stays_inside(changes, monkeypatch):
    """What acts and imagines in it hands on the same types as without."""
    found = []
    for on in (False, True):
        cast = torch.autocast("cpu", torch.bfloat16, on, cache_enabled=False)
        with monkeypatch.context() as patch:
            patch.setattr(hop, "fused", lambda f, args, device, cast=cast: f if f is hop.ppo_loss else cast(f))
            patch.setattr(torch, "baddbmm", lambda bias, rows, weight: hop.in_parts(rows, weight, bias))  # as on a GPU
            x = experiment(rehearsed=4, trust=False, **changes)
            x.rehearsed.pushed.fill_(x.args.replay_rollouts)
            found.append((hop.iterate(x, True, True)[1], x.tensors()))
    assert [t.dtype for t in tree_leaves(found[0])] == [t.dtype for t in tree_leaves(found[1])]
    values = [last["real"]["value"] for last, _ in found]
    assert not torch.equal(*values), "rounded"
    torch.testing.assert_close(*values, atol=0.05, rtol=0.05)


@pytest.mark.cuda
@pytest.mark.parametrize(("method", "precision"), [("ppo", "tf32"), ("hopplus", "tf32"), ("hopplus", "bf16")])
def test_captured_iterations_equal_eager_ones(method, precision, tmp_path, no_pictures):
    found = []
    for cudagraphs in (False, True):
        flags = {"device": "cuda", "cudagraphs": cudagraphs, "method": method, "total_steps": 6 * 32, "subgoal_period": 2}
        figures = run(tmp_path / str(cudagraphs), precision=precision, **flags)
        logged = without_times(lines_of(Path(figures["checkpoint"]).parent))
        found.append({**torch.load(figures["checkpoint"], weights_only=True)["tensors"], "logged": logged})
    for key in found[0]:
        assert same_tree(found[0][key], found[1][key]), key


@pytest.mark.cuda
@pytest.mark.parametrize("method", ["ppo", "hopplus"])
def test_compiled_iterations_are_close_to_eager_ones(method, tmp_path, no_pictures):
    """The same games and, after one iteration of 4 minibatches, the same figures up to rounding"""
    found = []
    for fused in (False, True):
        flags = {"device": "cuda", "compile": fused, "precision": "fp32", "method": method, "total_steps": 32}
        found.append(run(tmp_path / str(fused), **flags))
    for key in ("losses/policy", "losses/value", "losses/entropy", "losses/approx_kl", "losses/grad_norm"):
        assert found[1][key] == pytest.approx(found[0][key], rel=1e-3, abs=1e-5), key
    assert found[1]["charts/episodic_return"] == found[0]["charts/episodic_return"]


@pytest.mark.cuda
def test_lookups_in_one_kernel_are_the_same():
    x = experiment(device=torch.device("cuda"))
    things = torch.randint(x.env.config.num_cells + 1, (3, 500, 3 + x.env.config.num_prey), device="cuda")
    encoder, walls = x.nets.models.moa.encoder, torch.zeros(3, 500, 1, device="cuda")
    with torch.no_grad():
        fused = encoder(things, walls)
    torch.testing.assert_close(fused, encoder(things, walls).detach(), atol=1e-5, rtol=1e-4)


HOSTLESS = [{"method": "ppo"}, {}, {"seats": "learner,mixed,random", "wm_ensemble": 2}, {"seats": "learner,switching,waiting"}]


@pytest.mark.cuda
@pytest.mark.parametrize("changes", HOSTLESS)
def test_an_iteration_never_waits_for_the_host(changes):
    x = experiment(rehearsed=4, device=torch.device("cuda"), **changes)
    train = x.nets.models is not None
    for _ in range(2):
        hop.iterate(x, train, train)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        hop.iterate(x, train, train)
    finally:
        torch.cuda.set_sync_debug_mode("default")
