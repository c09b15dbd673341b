"""Acting by search: the trees are those of a plain-Python search, find what can be found, and train the policy."""

import copy
import csv
import dataclasses
import functools
import itertools
import math
import random
import re
from pathlib import Path

import helpers
import numpy as np
import pytest
import reference_game
import reference_search as reference
import torch
from helpers import (
    PRETRAINING_CASES,
    NoNonFiniteCasts,
    assert_same,
    games_of,
    lines_of,
    mixed_actions,
    random_kinds,
    seeded,
    state_of,
    without_times,
)
from torch import nn
from torch.nn import functional as F

import hopplus_mcts as hop
import hopplus_ppo as ppo
from stag_hunt_env import HUNT_HARE, HUNT_STAG, NUM_ACTIONS, RIGHT, STAY, StagHuntConfig, StagHuntEnv, StagHuntFlags, State

CPU = torch.device("cpu")
CONFIG = helpers.TINY_CONFIG
LEARNERS = "learner,learner,learner"
TINY = {**helpers.TINY, "method": "hopplus-mcts", "num_simulations": 6, "num_trees": 2}
pytestmark = pytest.mark.usefixtures("one_thread")


def args_of(**changes):
    return hop.resolved(hop.Args(**{**TINY, **changes}))


# ---------------------------------------------------------------------------------------------------------------------
# The batched search and the plain one grow the same trees


def deterministic(*key):
    return random.Random(repr(key))


class Numbers:
    """Networks that say something else about every position: numbers drawn from what stands there. Half of the positions have
    the legal actions of the game, the others any."""

    def __init__(self, config):
        self.config, self.known = config, {}

    def __call__(self, game, seat, tree, last_joint):
        key = (seat, game.position, game.present, game.prey, game.alive, sorted(game.walls), game.time, game.first_hunt)
        key = repr((*key, tuple(last_joint)))
        if (key, tree) not in self.known:
            self.known[key, tree] = self.said(game, seat, tree, key)
        return self.known[key, tree]

    def said(self, game, seat, tree, key):
        r = deterministic(key)
        legal = sorted(reference_game.legal_actions(self.config, game, seat))
        if r.random() < 0.5:
            legal = sorted(r.sample(range(NUM_ACTIONS), r.randint(1, NUM_ACTIONS)))
        policy = reference.softmax({action: r.gauss(0, 1.5) for action in legal})
        logits, value = {action: math.log(p) for action, p in policy.items()}, r.uniform(-2, 6)
        r = deterministic(key, tree)  # each tree expects something else of the others
        expected = []
        for _ in range(self.config.num_players - 1):
            weights = [r.random() * (r.random() < 0.7) for _ in range(NUM_ACTIONS)]
            weights[r.randrange(NUM_ACTIONS)] += 0.1
            expected.append([weight / sum(weights) for weight in weights])
        return reference.Said(logits, value, expected)


class Model:
    """The same game and networks for both searches. A position of the plain search is (game, seat, tree, last joint action);
    of the batched one, `state` holds these numbers in a row."""

    def __init__(self, config, networks=None, dtype=torch.float64, device=CPU):
        self.config, self.env, self.dtype = config, StagHuntEnv(config, device=device), dtype
        self.networks = networks or Numbers(config)

    # the plain search's

    def network(self, position):
        return self.networks(*position)

    def step(self, position, joint):
        game, seat, tree, _ = position
        n = self.config.num_players
        after = reference_game.Game(*(list(x) if isinstance(x, list) else x for x in vars(game).values()))
        actions = [joint[(i - seat) % n] for i in range(n)]
        rewards, _, over = reference_game.step(self.config, after, actions)
        return (after, seat, tree, joint), float(rewards[seat]), over or not after.present[seat]

    # the batched search's

    def pack(self, state, seat, tree, joint):
        """State of T games, seat, tree [T] -> Position"""
        row = [seat[:, None], tree[:, None], *(x.flatten(1).long() if x.dim() > 1 else x.long()[:, None] for x in state)]
        nothing = torch.zeros(len(seat), 0, device=seat.device)
        return hop.Position(nothing, state.time, state.first_hunt, joint, nothing, torch.cat(row, 1))

    def unpack(self, position):
        n, p = self.config.num_players, self.config.num_prey
        seat, tree, *fields = position.state.split([1, 1, n, n, p, p, self.config.num_cells, 1, 1], 1)
        kinds = (torch.int32, torch.bool, torch.int32, torch.bool, torch.uint8, torch.int32, torch.int32)
        fields = [x.to(kind) for x, kind in zip(fields, kinds, strict=True)]
        return State(*fields[:5], fields[5][:, 0], fields[6][:, 0]), seat[:, 0], tree[:, 0]

    def advance(self, position, joint):
        state, seat, tree = self.unpack(position)
        after, reward, _, over = self.env.transition(state, joint.gather(1, self.env.unego[seat]))
        reward, here = (x.gather(1, seat[:, None])[:, 0] for x in (reward, after.present))
        return self.pack(after, seat, tree, joint), reward.to(self.dtype), over | ~here

    def evaluate(self, position):
        state, seat, tree = self.unpack(position)
        rows = zip(games_of(state), seat.tolist(), tree.tolist(), position.last_joint.tolist(), strict=True)
        said = [self.networks(*row) for row in rows]
        logits = [[x.logits.get(action, hop.ILLEGAL) for action in range(NUM_ACTIONS)] for x in said]

        def tensor(values):
            return torch.tensor(values, dtype=self.dtype, device=position.state.device)

        return hop.Leaf(tensor(logits), tensor([x.value for x in said]), tensor([x.expected for x in said]), position)


def positions_in(env, generator, most=None):
    """Games of every age, some over"""
    kinds, state = random_kinds(env, generator), env.initial_state()
    age = torch.randint(env.config.final_time + 1 if most is None else most, (env.num_envs,), generator=generator)
    for t in range(int(age.max())):
        after, *_ = env.transition(state, mixed_actions(env, state, kinds, 0.2, generator))
        state = State(
            *(torch.where((t < age).view(-1, *[1] * (x.dim() - 1)), y, x) for x, y in zip(state, after, strict=True))
        )
    return state


class Roots:
    """`decisions` random positions, each the root of `trees` trees, with the random numbers of their searches"""

    def __init__(self, model, decisions, trees, simulations, seed):
        generator, config = seeded(seed), model.config
        env = StagHuntEnv(config, decisions, seed=seed)
        state = positions_in(env, generator)
        rows = torch.arange(decisions).repeat_interleave(trees)
        state = State(*(x[rows] for x in state))
        seat = torch.randint(config.num_players, (decisions,), generator=generator)[rows]
        joint = torch.randint(NUM_ACTIONS, (decisions, config.num_players), generator=generator)[rows]
        self.position = model.pack(state, seat, torch.arange(trees).repeat(decisions), joint)
        self.ended = env.game_over(state) | ~state.present.gather(1, seat[:, None])[:, 0]
        shape = (simulations, decisions * trees, config.num_players - 1)
        self.uniform = torch.rand(shape, dtype=torch.float64, generator=generator)
        gumbel = torch.rand(decisions, NUM_ACTIONS, dtype=torch.float64, generator=generator)
        self.gumbel = -(-gumbel.log()).log()[rows]

    def plain(self, model):
        """positions of the plain search"""
        state, seat, tree = model.unpack(self.position)
        joint = [tuple(x) for x in self.position.last_joint.tolist()]
        return list(zip(games_of(state), seat.tolist(), tree.tolist(), joint, strict=True))

    def only(self, rows):
        found = object.__new__(Roots)
        found.position = hop.Position(*(x[rows] for x in self.position))
        found.ended, found.uniform, found.gumbel = self.ended[rows], self.uniform[:, rows], self.gumbel[rows]
        return found

    def to(self, device, dtype):
        found = object.__new__(Roots)
        found.position = hop.Position(*(x.to(device) for x in self.position))
        found.ended = self.ended.to(device)
        found.uniform, found.gumbel = self.uniform.to(device, dtype), self.gumbel.to(device, dtype)
        return found


def grow(args, model, roots):
    scale = max(map(abs, model.config.payoffs()))
    table = torch.tensor(hop.halving_table(NUM_ACTIONS, len(roots.uniform)), dtype=model.dtype, device=roots.ended.device)
    root = model.evaluate(roots.position)
    numbers = (roots.uniform, roots.gumbel, table)
    return hop.search(args, scale, root, roots.ended, model.advance, model.evaluate, *numbers, lambda _: None)


def settings_of(args, config):
    names = ("root", "planner", "puct", "gamma", "q_temperature", "search_prior", "max_depth")
    return reference.Settings(**{name: getattr(args, name) for name in names}, scale=max(map(abs, config.payoffs())))


def assert_same_tree(row, tree, plain):
    """Row `row` of a batched tree and a plain one"""
    edges, nodes, joint = tree.edges[row].tolist(), tree.nodes[row].tolist(), tree.position.last_joint[row].tolist()
    pointed_at = set()
    for number in range(len(edges) - 1):  # the last one is the spare node
        visits, total, logits, child = edges[number]
        if number not in plain:
            assert not any(visits), f"row {row}: node {number} was visited"
            continue
        node = plain[number]
        where = f"row {row}, node {number}"
        assert {a: int(n) for a, n in enumerate(visits) if n} == {a: n for a, n in node.visits.items() if n}, where
        assert {a: int(c) for a, c in enumerate(child) if c} == node.child, where
        assert {a for a, logit in enumerate(logits) if logit > hop.ILLEGAL / 2} == set(node.said.logits), where
        for action in node.tried():
            assert total[action] / visits[action] == pytest.approx(node.q(action), abs=1e-9), where
        assert nodes[number][0] == pytest.approx(node.value, abs=1e-12) and nodes[number][2] == node.ended, where
        if number:
            assert nodes[number][1] == node.reward and tuple(joint[number]) == node.joint, where
        pointed_at |= set(node.child.values())
    assert pointed_at | {0} == set(plain)


BOARDS = {
    "4x4": StagHuntConfig(num_players=3, num_hares=3, final_time=7, time_reward=-0.1),
    "3x5": StagHuntConfig(height=3, width=5, num_players=2, num_stags=2, num_hares=2, final_time=6, max_wall_pieces=1),
}
COMPARED = [  # root, board, max_depth, num_trees, simulations, other flags
    ("puct", "4x4", 32, 1, 18, {}),
    ("puct", "4x4", 2, 3, 16, {"puct": 2.5, "gamma": 0.8}),
    ("puct", "3x5", 3, 1, 20, {"search_prior": 0.0, "q_temperature": 0.7}),
    ("puct", "3x5", 32, 3, 16, {"puct": 0.3, "search_prior": 0.5}),
    ("gumbel", "4x4", 32, 1, 20, {"search_prior": 0.0}),
    ("gumbel", "4x4", 2, 3, 16, {"gamma": 0.8, "q_temperature": 0.2}),
    ("gumbel", "3x5", 3, 1, 5, {"q_temperature": 2.0}),
    ("gumbel", "3x5", 32, 3, 16, {"q_temperature": 0.4}),
]


@pytest.mark.parametrize(("root", "board", "max_depth", "trees", "simulations", "flags"), COMPARED)
def test_trees_are_those_of_the_plain_search(root, board, max_depth, trees, simulations, flags):
    flags = {"gamma": 0.9, "q_temperature": 1.0, **flags}
    args = args_of(root=root, max_depth=max_depth, num_trees=trees, num_simulations=simulations, **flags)
    model = Model(BOARDS[board])
    compare(args, model, Roots(model, 210 // trees, trees, simulations, seed=simulations + max_depth), simulations)


@pytest.mark.parametrize(("root", "max_depth"), [("puct", 32), ("gumbel", 32), ("puct", 5)])
def test_walks_longer_than_need_be_change_nothing(root, max_depth):
    """--compile walks to one of four depths"""
    model, found = Model(BOARDS["4x4"]), []
    roots = Roots(model, 60, 1, 18, seed=4)
    for compiled in (False, True):
        args = args_of(root=root, max_depth=max_depth, gamma=0.9, q_temperature=1.0, compile=compiled)
        found.append(grow(args, model, roots))
    one, other = (part for tree in found for part in [(tree.edges, tree.nodes, tree.best, tree.follow)])
    assert all(torch.equal(a[:, :-1], b[:, :-1]) for a, b in zip(one, other, strict=True))
    assert not torch.equal(found[0].edges[:, -1], found[1].edges[:, -1]), "the spare node is visited more often"


def compare(args, model, roots, simulations):
    settings, trees = settings_of(args, model.config), args.num_trees
    tree = grow(args, model, roots)
    log_probs, played, visits, q = hop.verdict(args, tree, roots.gumbel, trees)
    depths, repeated = [], 0
    plain = []
    for row, position in enumerate(roots.plain(model)):
        numbers = roots.uniform[:, row].tolist(), roots.gumbel[row].tolist()
        plain.append(reference.search(settings, position, bool(roots.ended[row]), model.network, model.step, *numbers))
        assert_same_tree(row, tree, plain[-1])
        count = sum(plain[-1][0].visits.values())
        assert count == (0 if roots.ended[row] else simulations if args.planner == "mcts" else len(plain[-1][0].visits))
        depths.append(sum(sum(node.visits.values()) for node in plain[-1].values()) / max(1, count))
        repeated += len(plain[-1]) < count + 1
    for decision in range(len(log_probs)):
        own = plain[decision * trees : (decision + 1) * trees]
        improved, tried, worth, chosen = reference.verdict(settings, own, roots.gumbel[decision * trees].tolist())
        for action in range(NUM_ACTIONS):
            assert log_probs[decision, action].exp() == pytest.approx(improved.get(action, 0.0), abs=1e-9)
            assert visits[decision, action] == tried.get(action, 0)
            assert action not in worth or q[decision, action] == pytest.approx(worth[action], abs=1e-9)
        if args.root == "gumbel" and args.planner == "mcts":
            assert played[decision].tolist() == [action == chosen for action in range(NUM_ACTIONS)]
        else:
            assert torch.equal(played[decision], log_probs[decision].exp())
    assert 0 < roots.ended.sum() < len(depths) / 2, "some games are over, most are not"
    if args.planner == "mcts":
        assert repeated > 10 and max(depths) > (1.4 if args.max_depth == 2 else 2.0)


@pytest.mark.parametrize("root", ["puct", "gumbel"])
@pytest.mark.parametrize("trees", [1, 3])
def test_one_step_ahead_tries_each_legal_action_once(root, trees):
    args = args_of(root=root, planner="one-step", num_trees=trees, gamma=0.7, q_temperature=0.8, search_prior=0.6)
    model = Model(BOARDS["4x4"])
    compare(args, model, Roots(model, 60 // trees, trees, NUM_ACTIONS, seed=5), NUM_ACTIONS)


HALVING = [  # considered actions, simulations, visits of the action that is due
    (4, 8, [0, 0, 0, 0, 1, 1, 2, 2]),
    (7, 16, [*[0] * 7, 1, 1, 1, 2, 2, 3, 3, 4, 4]),
    (7, 5, [0, 0, 0, 0, 0]),
    (5, 32, [*[0] * 5, *[1] * 5, *[2, 2, 3, 3, 4, 4, 5, 5, 6, 6], *[7, 7, 8, 8, 9, 9, 10, 10, 11, 11], 12, 12]),
    (2, 6, [0, 0, 1, 1, 2, 2]),
    (1, 4, [0, 1, 2, 3]),
]


@pytest.mark.parametrize(("considered", "simulations", "due"), HALVING)
def test_halving_by_hand(considered, simulations, due):
    assert hop.halving_table(NUM_ACTIONS, simulations)[considered] == due == reference.schedule(considered, simulations)


def test_halving_tables_of_all_sizes():
    for simulations in (*range(1, 40), 64, 100):
        table = hop.halving_table(NUM_ACTIONS, simulations)
        assert len(table) == NUM_ACTIONS + 1
        for considered in range(1, NUM_ACTIONS + 1):
            assert table[considered] == reference.schedule(considered, simulations)
        cached = hop.halving(simulations, CPU)
        assert cached.tolist() == table and cached.dtype == torch.float32


@pytest.mark.parametrize(("root", "dtype"), [("puct", torch.float32), ("gumbel", torch.float32), ("puct", torch.float64)])
def test_rows_do_not_influence_each_other(root, dtype):
    args, model = args_of(root=root, gamma=0.9, q_temperature=1.0, max_depth=5), Model(BOARDS["4x4"], dtype=dtype)
    roots = Roots(model, 12, 1, 16, seed=3).to(CPU, dtype)
    together = grow(args, model, roots)
    shuffled = torch.randperm(12, generator=seeded(1))
    parts = [torch.tensor([row]) for row in range(12)] + [shuffled, shuffled[:5]]
    for rows in parts:
        found = grow(args, model, roots.only(rows))
        for name in ("edges", "nodes", "best", "follow", "expected"):
            ours, theirs = getattr(found, name), getattr(together, name)[rows]
            assert torch.equal(ours[:, :-1], theirs[:, :-1]), name
        for ours, theirs in zip(found.position, together.position, strict=True):
            assert torch.equal(ours[:, :-1], theirs[rows][:, :-1])
        verdicts = hop.verdict(args, found, roots.gumbel[rows], 1), hop.verdict(args, together, roots.gumbel, 1)
        assert all(torch.equal(ours, theirs[rows]) for ours, theirs in zip(*verdicts, strict=True))


# ---------------------------------------------------------------------------------------------------------------------
# What a search is good for


class Solved:
    """Networks that are right: co-players who do what is expected, a random policy, and its true values"""

    def __init__(self, config, gamma):
        self.config, self.gamma, self.model, self.known = config, gamma, Model(config, self), {}

    @staticmethod
    def key(game, seat):
        return seat, *(tuple(x) for x in (game.position, game.present, game.prey, game.alive)), game.time

    def others(self, game, seat):
        """what each co-player will do: the first to the stag, the next to the hares"""
        seats = [(seat + k) % self.config.num_players for k in range(1, self.config.num_players)]
        names = ["nearest_stag", "nearest_hare"]
        probs = [reference_game.player_probs(self.config, game, i, names[k % 2]) for k, i in enumerate(seats)]
        return [p.index(max(p)) for p in probs]

    def q(self, game, seat):
        found = {}
        for action in reference_game.legal_actions(self.config, game, seat):
            (after, *_), reward, over = self.model.step((game, seat, 0, ()), (action, *self.others(game, seat)))
            found[action] = reward + (0.0 if over else self.gamma * self(after, seat, 0, ()).value)
        return found

    def __call__(self, game, seat, tree, last_joint):
        key = self.key(game, seat)
        if key not in self.known:
            legal, r = reference_game.legal_actions(self.config, game, seat), deterministic(key)
            policy, value = reference.softmax({action: r.gauss(0, 1.5) for action in sorted(legal)}), 99.0
            if game.present[seat] and not reference_game.game_over(self.config, game):
                q = self.q(game, seat)
                value = sum(policy[action] * q[action] for action in policy)
            expected = [[float(action == a) for action in range(NUM_ACTIONS)] for a in self.others(game, seat)]
            self.known[key] = reference.Said({a: math.log(p) for a, p in policy.items()}, value, expected)
        return self.known[key]


@functools.cache
def solved(gamma):
    return Solved(StagHuntConfig(height=3, width=3, num_players=3, num_hares=2, final_time=5), gamma)


def improvements(args, simulations):
    """What the improved policy earns beyond the policy at each of > 100 positions, if the rest is played by the policy; and
    what the search's own Q promises"""
    networks = solved(args.gamma)
    roots = Roots(networks.model, 180, 1, simulations, seed=11)
    tree, true, promised = grow(args, networks.model, roots), [], []
    log_probs, _, _, found = hop.verdict(args, tree, roots.gumbel, 1)
    for row, (game, seat, *_) in enumerate(roots.plain(networks.model)):
        if not roots.ended[row]:
            q, logits = networks.q(game, seat), networks(game, seat, 0, ()).logits
            change = {action: log_probs[row, action].exp().item() - math.exp(logits[action]) for action in logits}
            true.append(sum(change[action] * q[action] for action in q))
            promised.append(sum(change[action] * found[row, action].item() for action in q))
    assert len(true) > 100
    return torch.tensor(true), torch.tensor(promised)


@pytest.mark.parametrize("root", ["puct", "gumbel"])
@pytest.mark.parametrize("simulations", [8, 32])
def test_no_position_gets_worse_when_the_leaves_are_exact(root, simulations):
    """One step deep, where Q is exact."""
    args = args_of(root=root, max_depth=1, gamma=0.95, search_prior=1.0)
    true, promised = improvements(args, simulations)
    assert true.min() >= -1e-6 and promised.min() >= -1e-6 and true.mean() > 0.15


def test_no_position_gets_worse_by_looking_one_step_ahead():
    true, promised = improvements(args_of(planner="one-step", gamma=0.95, search_prior=1.0), NUM_ACTIONS)
    assert true.min() >= -1e-6 and true.mean() > 0.2
    torch.testing.assert_close(true, promised)


@pytest.mark.parametrize("root", ["puct", "gumbel"])
def test_deep_search_improves_the_policy(root):
    """Deeper, Q is that of what the search would do, not of what the policy does, so a few positions may seem to get worse."""
    true, promised = improvements(args_of(root=root, gamma=0.95, search_prior=1.0), 32)
    assert promised.min() >= -1e-6 and (true >= -1e-6).float().mean() > 0.85 and true.mean() > 0.25


class Afraid:
    """A policy without preference, and a critic that expects nothing, and less than nothing on the stag's cell"""

    @staticmethod
    def inputs(board, clock, last_joint, goals):
        return board

    def __call__(self, board, legal):
        on_the_stag = (board[:, :, 0] * board[:, :, -2]).flatten(2).amax(2)
        return torch.zeros(legal.shape).masked_fill(~legal, -1e9).log_softmax(-1), -0.2 * on_the_stag.float()


class Hunters:
    """Models of co-players who walk to the stag and hunt it; they have no subgoals."""

    def __init__(self, env):
        self.env, self.inference, self.moa = env, self, self

    def encoder(self, things, walls):
        return things.float()

    def __call__(self, things, *others):
        if len(others) == 1:  # as q_phi
            return torch.zeros(*things.shape[:2], 2 * 5)
        n, cells = self.env.config.num_players, self.env.config.num_cells
        here, stag = things[..., 0].long().clamp(max=cells - 1), things[..., n].long().clamp(max=cells - 1)
        far = self.env.manhattan[self.env.target[here], stag[..., None]]
        wish = -far.float() - torch.tensor([0.0, 0.0, 0.0, 0.0, 0.5, 0.0, 9.0])
        return (100 * wish).masked_fill(~others[-1], -1e9).log_softmax(-1)


def situation(text, final_time):
    """A game on one row of cells: the learner L (on a hare: H, on the stag: W), its partner P (on the stag: Q), the stag S
    and hares h"""
    learner, partner, stag = (next(i for i, x in enumerate(text) if x in names) for names in ("LHW", "PQ", "SQW"))
    prey = [stag, *(i for i, x in enumerate(text) if x in "hH")]
    config = StagHuntConfig(1, len(text), num_players=2, num_hares=len(prey) - 1, final_time=final_time)
    game = reference_game.Game([learner, partner], [True, True], prey, [True] * len(prey), set())
    return StagHuntEnv(config), state_of(config, [game])


def known_of(args, env, state, models, seat=0):
    """What one learner knows in each game of a state"""
    (games,), board, prey = state.time.shape, env.observe(state)[None, :, seat], state.prey_position[None].long()
    summary = torch.zeros(1, games, env.config.num_players - 1, args.hidden)
    last = torch.full((1, games, env.config.num_players), STAY)
    thought = hop.think(args, env, models, board, prey, env.clock(state)[None], summary, summary[..., :0], seeded(1))
    now = state.time[None], state.first_hunt[None]
    return hop.Known(board, prey, *now, last, summary, summary[..., :0], thought, torch.full((1, games), seat))


def decide(args, env, state, copies=8):
    """The policies [copies, 7] that as many searches of the same position find, and what they play; what the partner does"""
    state = State(*(x.repeat_interleave(copies, 0) for x in state))
    models = Hunters(env)
    known = known_of(args, env, state, models)
    found = hop.plan(args, env, hop.Nets(Afraid(), models, None), known, seeded(2))
    return found.log_probs[0].exp(), found.played[0].argmax(1).tolist(), int(known.thought.expected[0, 0, 0].argmax())


SEARCHERS = {
    "puct": {"planner": "mcts", "root": "puct"},
    "puct without prior": {"planner": "mcts", "root": "puct", "search_prior": 0.0},
    "gumbel": {"planner": "mcts", "root": "gumbel"},
    "one-step": {"planner": "one-step"},
}
KNOWN = {"config": StagHuntFlags(num_players=2), "seats": "learner,learner", "subgoals": "none", "search_model": "env"}
KNOWN |= {"num_simulations": 96, "num_trees": 1, "max_depth": 6}


@pytest.mark.parametrize("searcher", SEARCHERS)
def test_a_trap_two_steps_deep(searcher):
    """The partner hunts the stag, in vain, until somebody joins; the learner stands on a hare, one step away. The hare pays at
    once, and the critic does not like the stag's cell."""
    args = args_of(**KNOWN, **SEARCHERS[searcher])
    env, state = situation(".HQ.", final_time=10)
    policy, played, partner = decide(args, env, state)
    best = HUNT_HARE if searcher == "one-step" else RIGHT
    assert partner == HUNT_STAG and (policy[:, best] > 0.9).all()
    if searcher != "one-step":
        assert set(played) == {RIGHT}
        state, reward, _, _ = env.transition(state, torch.tensor([[RIGHT, partner]]))
        policy, played, partner = decide(args, env, state)
        assert reward.tolist() == [[0, 0]] and set(played) == {HUNT_STAG} and (policy[:, HUNT_STAG] > 0.9).all()
        _, reward, _, _ = env.transition(state, torch.tensor([[HUNT_STAG, partner]]))
        assert reward.tolist() == [[5, 5]]


@pytest.mark.parametrize(("searcher", "final_time"), [("puct", 10), ("puct without prior", 3), ("gumbel", 3)])
def test_a_partner_worth_waiting_for(searcher, final_time):
    """The learner stands on the stag, its partner needs one step more, and a hare is next door. To hunt alone is to stay."""
    args = args_of(**KNOWN, **SEARCHERS[searcher])
    env, state = situation("hWP.", final_time)
    policy, played, partner = decide(args, env, state)
    assert set(played) <= {STAY, HUNT_STAG} and (policy[:, [STAY, HUNT_STAG]].sum(1) > 0.9).all()
    assert (policy[:, STAY] > 0.4).all()
    state, reward, _, _ = env.transition(state, torch.tensor([[STAY, partner]]))
    assert reward.tolist() == [[0, 0]]
    policy, played, partner = decide(args, env, state)
    assert set(played) == {HUNT_STAG} and (policy[:, HUNT_STAG] > 0.9).all()
    _, reward, _, _ = env.transition(state, torch.tensor([[HUNT_STAG, partner]]))
    assert reward.tolist() == [[5, 5]]


def test_the_rest_of_a_game_is_worth_nothing_after_its_end():
    """In the last step only the hare can still be had: with one step more, the stag."""
    args = args_of(**{**KNOWN, **SEARCHERS["puct"], "num_simulations": 48})
    for final_time, best in ((1, HUNT_HARE), (2, RIGHT)):
        policy, _, _ = decide(args, *situation(".HQ.", final_time), copies=1)
        assert policy[0].argmax() == best and policy[0, best] > 0.9


# ---------------------------------------------------------------------------------------------------------------------
# The model that a search plays with

RULES = {**PRETRAINING_CASES, "4x4": BOARDS["4x4"]}
RULES["short"] = StagHuntConfig(height=2, width=4, num_players=4, num_hares=2, final_time=9, steps_after_first_hunt=2)


@pytest.mark.parametrize("config", RULES.values(), ids=RULES)
def test_rules_on_boards_are_those_of_the_game(config):
    games, generator, n = 30, seeded(4), config.num_players
    env, seen = StagHuntEnv(config, games, seed=6), set()
    for _ in range(4):
        state = positions_in(env, generator)
        actions = mixed_actions(env, state, random_kinds(env, generator), 0.3, generator)
        after, reward, _, _ = env.transition(state, actions)
        for seat in range(n):
            order = [(seat + k) % n for k in range(n)]
            position = hop.Position(env.observe(state)[:, seat], state.time, state.first_hunt, None, None, None)
            where = torch.full((games,), seat)
            board, paid = hop.rules(env, position, state.prey_position.long(), actions[:, order], where)
            assert_same("board", board, env.observe(after)[:, seat])
            assert_same("reward", paid, reward[:, seat])
        seat = torch.randint(n, (games,), generator=generator)  # every row another seat
        rows = torch.arange(games)
        position = position._replace(board=env.observe(state)[rows, seat])
        joint = actions.gather(1, (seat[:, None] + torch.arange(n)) % n)
        board, paid = hop.rules(env, position, state.prey_position.long(), joint, seat)
        assert_same("board", board, env.observe(after)[rows, seat])
        assert_same("reward", paid, reward[rows, seat])
        seen |= {("left", bool((~state.present).any())), ("caught", bool((state.prey_alive & ~after.prey_alive).any()))}
    assert {("left", True), ("caught", True)} <= seen


def test_payoffs_of_unequal_players_depend_on_the_seat():
    env = StagHuntEnv(StagHuntConfig(height=2, width=3, num_players=3, num_hares=1, strengths=(1, 2, 5)))
    game = reference_game.Game([0, 0, 0], [True, True, True], [0, 4], [True, True], set())
    state = state_of(env.config, [game])
    for seat, share in enumerate((10 * 1 / 8, 10 * 2 / 8, 10 * 5 / 8)):
        position = hop.Position(env.observe(state)[:, seat], state.time, state.first_hunt, None, None, None)
        joint, prey = torch.full((1, 3), HUNT_STAG), state.prey_position.long()
        _, paid = hop.rules(env, position, prey, joint, torch.tensor([seat]))
        assert paid.tolist() == pytest.approx([share])


class TrueWorld(nn.Module):
    """The rules in the place of the world model; a second member is always wrong."""

    def __init__(self, env, prey, seat, members):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(len(prey) * members, 1))
        self.env, self.prey, self.seat, self.members = env, prey, seat, members

    def predict(self, board, joint, with_raw=True):
        clock = torch.zeros(board.shape[:2].numel(), dtype=torch.int32)
        position = hop.Position(board.flatten(0, 1), clock, clock - 1, None, None, None)
        prey, seat = (x.repeat_interleave(self.members, 0).flatten(0, 1) for x in (self.prey, self.seat))
        after, reward = hop.rules(self.env, position, prey, joint.flatten(0, 1), seat)
        after, reward = after.view_as(board).clone(), reward.view(board.shape[:2]).clone()
        if self.members > 1:
            after[1 :: self.members], reward[1 :: self.members] = 1, 7.0
        return hop.Prediction(after, None, reward)


def experiment(rehearsed=0, device=CPU, **changes):
    args = args_of(device=device.type, **changes)
    kinds = [hop.seat_kinds(args.seats.split(","))] * args.num_seeds
    seating = hop.make_seating(kinds, args.num_envs, args.share_parameters, device)
    return hop.make_experiment(args, seating, list(range(args.seed, args.seed + args.num_seeds)), device, rehearsed)


def play(x, num_steps, **options):
    return hop.rollout(x.args, x.env, x.seating, x.nets, x.carry, x.generator, num_steps, **options)


def outspoken(x, factor=100.0):
    """Networks say more than those that have not learned anything."""
    with torch.no_grad():
        for net in (x.nets.policy.actor[-1], x.nets.models.moa.head):
            net.weight *= factor
        x.nets.models.inference.event[1].bias += 0.1  # so that every step leaves a trace
    return x


class Search:
    """One call of `plan`: what it was given, the generator before, what it found; what `foresee` was told and what the policy
    read meanwhile"""

    def __init__(self, x, known, before, found, told, read):
        self.x, self.known, self.before, self.plan, self.tree = x, known, before, found, found.tree
        self.told, self.read = told, read
        self.visits = self.tree.edges[:, :-1, 0]  # [T, nodes, 7]; the last node is the spare one
        self.nodes = self.visits.shape[1]
        self.prey, self.seat = self.for_trees(known.prey), self.for_trees(known.seat)
        child = self.tree.edges[:, :-1, 3]
        self.row, self.parent, self.action = child.nonzero(as_tuple=True)  # all edges that lead somewhere
        self.child = child[self.row, self.parent, self.action].long()
        self.reached = torch.zeros(self.visits.shape[:2], dtype=torch.bool)
        self.reached[:, 0] = self.reached[self.row, self.child] = True
        here = known.board[:, :, 0].flatten(2).amax(2) > 0
        self.gone = ~self.for_trees(here | x.env.config.prosocial)
        self.everywhere = self.by_learner(self.prey[:, None].expand(-1, self.nodes, -1))
        self.views = hop.all_views(x.env, self.by_learner(self.tree.position.board[:, :-1]), self.everywhere)
        self.legal = self.views[2].reshape(*self.visits.shape[:2], -1, NUM_ACTIONS)  # [T, nodes, N, 7]

    def for_trees(self, field):
        """[M, E, ...] -> [T = M * E * trees, ...]"""
        return field.repeat_interleave(self.x.args.num_trees, 1).flatten(0, 1)

    def by_learner(self, field):
        """[T, nodes, ...] -> [M, _, ...]"""
        return field.unflatten(0, (len(self.known.time), -1)).flatten(1, 2)

    def at(self, nodes):
        return hop.Position(*(field[self.row, nodes] for field in self.tree.position))


def searches(x, num_steps):
    """Plays, and returns the search of each step"""
    plan, foresee, inputs, seen, told, read = hop.plan, hop.foresee, hop.ActorCritic.inputs, [], [], []

    def watched(args, env, nets, known, generator, *rest):
        before = generator.get_state()
        told.clear()
        read.clear()
        found = plan(args, env, nets, known, generator, *rest)
        seen.append((x, known, before, found, list(told), list(read)))
        return found

    def watched_inputs(*given):
        read.append(given[4])
        return inputs(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hop, "plan", watched)
        patch.setattr(hop, "foresee", lambda *given: (told.append(given[5]), foresee(*given))[1])
        patch.setattr(hop.ActorCritic, "inputs", watched_inputs)
        play(x, num_steps)
    return [Search(*given) for given in seen]


PLANS = {
    "world model": {"num_seeds": 2},
    "env": {"search_model": "env", "root": "gumbel", "num_trees": 3},
    "hop": {"method": "hop", "num_trees": 2, "seats": "learner,random,learner"},
    "inferred in the tree": {"infer_in_tree": True, "search_model": "env"},
    "hop inferred in the tree": {"method": "hop", "infer_in_tree": True, "num_trees": 2},
    "shared": {"share_parameters": True, "search_model": "env", "subgoals": "none", "root": "gumbel"},
    "oracle": {"subgoals": "oracle", "search_model": "env", "seats": "learner,mixed,nearest_stag"},
    "one-step": {"planner": "one-step", "search_model": "env"},
    "prosocial": {"search_model": "env", "config": dataclasses.replace(CONFIG, prosocial=True, time_reward=-0.1)},
    "limit": {"search_model": "env", "config": dataclasses.replace(CONFIG, steps_after_first_hunt=1)},
}
IN_TREE = [name for name, changes in PLANS.items() if "infer_in_tree" in changes]


@functools.cache
def planned(name):
    x = outspoken(experiment(num_envs=8, **PLANS[name]))
    return x, searches(x, 8)


every_plan = pytest.mark.parametrize("name", PLANS)


@every_plan
def test_a_search_starts_where_its_learner_is_and_not_if_it_has_left(name):
    x, found = planned(name)
    left = 0
    for s in found:
        for field, given in zip(s.tree.position[:4], (s.known.board, *s.known[2:5]), strict=True):
            assert torch.equal(field[:, 0], s.for_trees(given).to(field.dtype))
        each = s.legal[:, 0, 0].sum(1) if x.args.planner == "one-step" else x.args.num_simulations
        assert torch.equal(s.visits[:, 0].sum(1), torch.where(s.gone, 0, each).float())
        assert not s.visits[s.gone].any() and not s.tree.edges[s.gone, :-1, 3].any()
        gone = s.gone[:: x.args.num_trees]
        for probs in (s.plan.log_probs.exp(), s.plan.played):
            assert (probs.flatten(0, 1)[gone] == F.one_hot(torch.tensor(STAY), NUM_ACTIONS)).all()
        left += int(gone.sum())
    assert (left > 0) != x.env.config.prosocial


@every_plan
def test_only_legal_actions_are_tried_and_played(name):
    x, found = planned(name)
    for s in found:
        assert not s.visits[~s.legal[:, :, 0]].any() and s.visits.any()
        joint = s.at(s.child).last_joint
        assert torch.equal(joint[:, 0], s.action) and s.legal[s.row, s.parent].gather(2, joint[..., None]).all()
        legal = s.legal[:: x.args.num_trees, 0, 0]
        for probs in (s.plan.log_probs.exp().flatten(0, 1), s.plan.played.flatten(0, 1)):
            assert not probs[~legal].any()
            torch.testing.assert_close(probs.sum(1), torch.ones(len(probs)))


@every_plan
def test_every_edge_leads_where_the_model_says(name):
    x, found = planned(name)
    config, ends, deep = x.env.config, 0, 0
    for s in found:
        old, new = s.at(s.parent), s.at(s.child)
        if x.args.search_model == "env":
            board, reward = hop.rules(x.env, old, s.prey[s.row], new.last_joint, s.seat[s.row])
        else:
            learners = len(s.known.time)
            said = x.nets.world.predict(*(y.expand(learners, *y.shape) for y in (old.board, new.last_joint)))
            own = s.row // (len(s.visits) // learners), torch.arange(len(s.row))
            board, reward = said.board[own], said.reward[own]
        assert torch.equal(new.board, board) and torch.equal(s.tree.nodes[s.row, s.child, 1], reward)
        caught = (new.board[:, -2:] != old.board[:, -2:]).flatten(1).any(1)
        first = torch.where(caught & (old.first_hunt < 0), new.time, old.first_hunt)
        over = new.time >= config.final_time
        over |= new.board[:, : config.num_players if config.prosocial else 1].flatten(1).amax(1) == 0
        if config.steps_after_first_hunt is not None:
            over |= (first >= 0) & (new.time >= first + config.steps_after_first_hunt)
        assert torch.equal(new.time, old.time + 1) and torch.equal(new.first_hunt, first)
        assert torch.equal(s.tree.nodes[s.row, s.child, 2] > 0, over)
        assert not s.tree.nodes[s.row, s.child, 0][over].any(), "an end is worth nothing"
        assert not s.visits[s.row, s.child][over].any(), "and leads nowhere"
        assert s.visits[s.row, s.parent, s.action].all() and (s.child > s.parent).all()
        ends, deep = ends + int(over.sum()), deep + int((s.parent > 0).sum())
    assert ends > 0 and (deep > 0) == (x.args.planner == "mcts")


@every_plan
def test_every_node_holds_what_the_networks_say(name):
    """The subgoals of the root are read, and expected of the co-players, in the whole tree; or they are inferred anew from
    what has been remembered on the way."""
    x, found = planned(name)
    args, models, k, clocks = x.args, x.nets.models, x.env.config.num_players - 1, set()
    for s in found:
        things, walls, legal = s.views
        position = hop.Position(*(field[:, :-1] for field in s.tree.position))
        clock = s.by_learner(position.time) / x.env.config.final_time
        root_goals = s.for_trees(s.known.thought.goals)
        if args.infer_in_tree:
            given = s.by_learner(position.board), s.everywhere, clock, s.by_learner(position.summary), None
            thought = hop.think(args, x.env, models, *given, seeded(1))
            goals = thought.goals
            torch.testing.assert_close(thought.state.view(position.state.shape)[s.reached], position.state[s.reached])
            assert s.told == []
        else:
            goals, drawn = s.by_learner(root_goals[:, None].expand(-1, s.nodes, -1)), s.told[0]
            assert len(s.told) == len(s.read) == s.nodes and all(torch.equal(drawn, other) for other in s.told)
            assert all(torch.equal(read.flatten(0, 1), root_goals) for read in s.read)
            drawn = drawn.unflatten(1, (-1, 1, k)).expand(-1, -1, s.nodes, -1, -1).flatten(1, 3)
            things, walls, able = (y[:, :, 1:].flatten(1, 2) for y in (things, walls, legal))
            others = models.moa(models.moa.encoder(things, walls), clock.repeat_interleave(k, 1), drawn, able)
            expected = others.exp().view(s.tree.expected[:, :-1].shape)
            torch.testing.assert_close(s.tree.expected[:, :-1][s.reached], expected[s.reached], atol=1e-5, rtol=1e-4)
        inputs = x.nets.policy.inputs(s.by_learner(position.board), clock, s.by_learner(position.last_joint), goals)
        logits, value = x.nets.policy(inputs, legal[:, :, 0])
        on = s.reached & (s.tree.nodes[:, :-1, 2] == 0)
        ours = s.tree.edges[:, :-1, 2][s.reached], s.tree.nodes[:, :-1, 0][on]
        torch.testing.assert_close(ours[0], logits.view(s.visits.shape)[s.reached], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(ours[1], value.view(on.shape)[on], atol=1e-4, rtol=1e-4)
        clocks |= set(clock[0, : s.nodes].tolist())
    assert len(clocks) > 3


@pytest.mark.parametrize("name", IN_TREE)
def test_what_is_remembered_along_a_path(name):
    x, found = planned(name)
    changed, learners = 0, len(x.trusted)
    for s in found:
        assert torch.equal(s.tree.position.summary[:, 0], s.for_trees(s.known.summary))
        old, new, learner = s.at(s.parent), s.at(s.child), s.row // (len(s.visits) // learners)
        for m in range(learners):  # one learner's networks at a time
            mine, models = learner == m, copy.deepcopy(x.nets.models)
            for weight in models.parameters():
                weight.data = weight.data[m : m + 1]
            present = old.board[mine][None, :, 1 : x.env.config.num_players].flatten(3).amax(3) > 0
            thought = hop.Thought(None, None, old.state[mine].flatten(0, 1)[None], present, None)
            never = torch.zeros(1, int(mine.sum()), dtype=torch.bool)
            given = (thought, new.last_joint[mine][None], old.summary[mine][None], never)
            torch.testing.assert_close(new.summary[mine], hop.remember(x.args, x.env, models, *given)[0])
        differ = (new.summary != old.summary).any(2)
        present = old.board[:, 1 : x.env.config.num_players].flatten(2).amax(2) > 0
        assert torch.equal(differ, present), "who has left adds nothing"
        changed += int(differ.sum())
    assert changed > 100


@every_plan
def test_what_a_search_promises(name):
    """Gain: what Q promises beyond the policy's own actions; and how far from the policy it goes for that (KL)"""
    x, found = planned(name)
    trees = x.args.num_trees
    for s in found:
        visits, total, logits, _ = s.tree.edges[:, 0].unbind(1)
        q = hop.completed(visits, total, logits, s.tree.nodes[:, 0, :1]).unflatten(0, (-1, trees)).mean(1)
        new, old = s.plan.log_probs.flatten(0, 1).exp(), logits[::trees].exp()
        gain, kl, _ = s.plan.found.flatten(0, 1).unbind(1)
        torch.testing.assert_close(gain, ((new - old) * q).sum(1), atol=1e-4, rtol=1e-4)
        terms = torch.where(new > 0, new * (new.log() - old.clamp(min=1e-30).log()), 0.0)
        torch.testing.assert_close(kl, terms.sum(1), atol=1e-4, rtol=1e-4)
        assert (gain >= -1e-4).all() or x.args.search_prior != 1


@every_plan
def test_how_deep_a_search_goes(name):
    """The mean length of its walks"""
    x, found = planned(name)
    for s in found:
        walked = s.visits.sum((1, 2)) / s.visits[:, 0].sum(1).clamp(min=1)
        torch.testing.assert_close(s.plan.found[..., 2].flatten(), walked.view(-1, x.args.num_trees).mean(1))
        assert (walked[~s.gone] >= 1).all() and (x.args.planner == "mcts" or (walked <= 1).all())


@pytest.mark.parametrize("name", ["world model", "env", "inferred in the tree", "hop"])
def test_the_same_random_numbers_give_the_same_search(name):
    x, found = planned(name)
    s, generator = found[2], torch.Generator()
    plans = []
    for seed in (None, None, 5):
        generator.set_state(s.before) if seed is None else generator.manual_seed(seed)
        plans.append(hop.plan(x.args, x.env, x.nets, s.known, generator))
    for other in plans[:2]:
        for ours, theirs in zip(other[:3], s.plan[:3], strict=True):
            assert torch.equal(ours, theirs)
        assert torch.equal(other.tree.edges[:, :-1], s.tree.edges[:, :-1])
    assert not torch.equal(plans[2].log_probs, s.plan.log_probs)
    assert (plans[2].tree.position.last_joint != s.tree.position.last_joint).any()


def test_the_random_numbers_of_a_search():
    """Q is measured in units of the highest payoff; each edge of each tree has other numbers; the trees of a decision share
    their Gumbel noise."""
    x, search, given = experiment(num_envs=64, num_trees=3, search_model="env"), hop.search, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hop, "search", lambda *parts: (given.append(parts), search(*parts))[1])
        play(x, 1)
    ((_, scale, root, gone, _, _, uniform, gumbel, table, _),) = given
    trees = 3 * 64 * 3
    assert scale == 5 and len(root.value) == len(gone) == trees and table.tolist() == hop.halving_table(NUM_ACTIONS, 6)
    assert uniform.shape == (6, trees, 2) and len(uniform.unique()) > 0.99 * uniform.numel()
    assert 0 <= uniform.min() < 0.01 and 0.99 < uniform.max() < 1
    noise = gumbel.unflatten(0, (-1, 3))
    assert (noise == noise[:, :1]).all() and len(noise[:, 0].unique()) > 0.99 * 3 * 64 * 7
    assert noise.mean() == pytest.approx(0.5772, abs=0.1) and noise.var() == pytest.approx(math.pi**2 / 6, abs=0.3)
    assert noise.median() == pytest.approx(-math.log(math.log(2)), abs=0.1)


@torch.no_grad()
@pytest.mark.parametrize("name", ["world model", "env", "hop"])
def test_each_tree_has_subgoals_of_its_own(name):
    x, found = planned(name)
    args, k, models, scores, frequency = x.args, x.env.config.num_players - 1, x.nets.models, [], []
    for s in found:
        drawn = s.told[0].unflatten(1, (-1, args.num_trees, k))  # [M, E, trees, K, D]
        believed = hop.believe(args, models, s.known.thought.state, s.known.summary.flatten(1, 2).float())
        believed = believed.unflatten(1, (-1, 1, k)).expand(-1, -1, args.num_trees, -1, -1)
        if args.goal_kind == "continuous":
            assert (drawn[:, :, 0] != drawn[:, :, 1]).all()
            mean, spread = believed.chunk(2, -1)
            scores.append((drawn - mean) / (0.5 * spread.clamp(-8, 4)).exp())
        else:
            torch.testing.assert_close(drawn, F.one_hot(drawn.argmax(-1), 2).float())
            first = drawn[..., 0].round()
            assert 0 < (first[:, :, 0] != first[:, :, 1]).float().mean() < 1
            frequency.append(first - believed[..., 0].exp())
    if scores:
        scores = torch.stack(scores)
        assert abs(scores.mean()) < 0.05 and abs(scores.std() - 1) < 0.05
        apart = scores[:, :, :, 0] - scores[:, :, :, 1]
        assert float(apart.std()) == pytest.approx(math.sqrt(2), abs=0.1), "independent"
    else:
        assert abs(torch.stack(frequency).mean()) < 0.05


@pytest.mark.parametrize("name", ["world model", "env"])
def test_the_trees_of_a_decision_are_averaged(name):
    x, found = planned(name)
    args, s = x.args, found[0]
    trees, differ = args.num_trees, 0
    for decision in range(0, 24, 5):
        rows = range(decision * trees, (decision + 1) * trees)
        q, visits = torch.zeros(NUM_ACTIONS, dtype=torch.float64), torch.zeros(NUM_ACTIONS)
        for row in rows:
            count, total, logits, _ = s.tree.edges[row, 0].double()
            tried = count > 0
            policy = logits.exp()
            of_tried = (policy * total / count.clamp(min=1))[tried].sum() / policy[tried].sum()
            guess = (s.tree.nodes[row, 0, 0] + count.sum() * of_tried) / (1 + count.sum())
            q += torch.where(tried, total / count.clamp(min=1), guess) / trees
            visits += count.float()
        scale = 1 + float(visits.max()) / trees / 50 if args.root == "gumbel" else 1
        improved = (logits + args.q_temperature * scale * q).softmax(0)
        torch.testing.assert_close(s.plan.log_probs.flatten(0, 1)[decision].exp().double(), improved, atol=1e-4, rtol=1e-3)
        alone = [hop.verdict(args, hop.Tree(*(y[r : r + 1] for y in s.tree[:5]), None), torch.zeros(1, 7), 1)[0] for r in rows]
        differ += int((alone[0] != alone[1]).any())
    assert differ > 0


@pytest.mark.parametrize(("members", "share"), [(1, True), (2, False)])
def test_a_perfect_world_model_searches_as_the_rules_do(members, share):
    x = outspoken(experiment(search_model="env", wm_ensemble=members, num_envs=8, share_parameters=share, num_seeds=2))
    for s in searches(x, 6):
        prey, seat = (y.repeat_interleave(x.args.num_trees, 1) for y in (s.known.prey, s.known.seat))
        nets = x.nets._replace(world=TrueWorld(x.env, prey, seat, members))
        args = dataclasses.replace(x.args, search_model="world-model")
        found = hop.plan(args, x.env, nets, s.known, torch.Generator().set_state(s.before))
        for part in (0, 1, 3):  # what stands in nodes that nobody visits does not matter
            assert torch.equal(found.tree.edges[:, :-1, part], s.tree.edges[:, :-1, part])
        assert torch.equal(found.log_probs, s.plan.log_probs) and torch.equal(found.played, s.plan.played)


@pytest.mark.parametrize("sign", [1, -1])
def test_predicted_rewards_are_clipped_to_the_payoffs(sign):
    x = experiment(wm_head="pixel")
    with torch.no_grad():
        x.nets.world.head.bias[..., -1] = sign * 1e6
    for s in searches(x, 2):
        assert (s.tree.nodes[s.row, s.child, 1] == (5.0 if sign > 0 else 0.0)).all()


# ---------------------------------------------------------------------------------------------------------------------
# HOP's belief: stag or hare, by Bayes' rule


def likelihoods(x, board, prey, time):
    """[M, n, K, goals, 7] MOA's log-probabilities of each co-player's actions, for each goal by itself; present [M, n, K]"""
    models, k = x.nets.models, x.env.config.num_players - 1
    things, walls, legal = (y[:, :, 1:].flatten(1, 2) for y in hop.all_views(x.env, board, prey.long()))
    clock = (time / x.env.config.final_time).repeat_interleave(k, 1)
    goals = [F.one_hot(torch.full(clock.shape, goal), 2).float() for goal in range(2)]
    said = [models.moa(models.moa.encoder(things, walls), clock, goal, legal) for goal in goals]
    present = board[:, :, 1 : k + 1].flatten(3).amax(3) > 0
    return torch.stack(said, 2).detach().unflatten(1, (-1, k)), present


def bayes(explains, pursued):
    """Prior (1 + how often each was pursued) times likelihood, by hand"""
    weights = [(1 + often) * math.exp(score - max(explains)) for score, often in zip(explains, pursued, strict=True)]
    return [weight / sum(weights) for weight in weights]


@pytest.mark.parametrize("remembers", [True, False])
def test_belief_in_stag_or_hare_by_hand(remembers):
    flags = {"inter_episode_belief": remembers, "memory_discount": 0.7, "forget": 0.0, "planner": "none"}
    x = outspoken(experiment(method="hop", num_envs=6, **flags), factor=3000.0)
    explains, pursued = np.zeros((3, 6, 2, 2)), np.zeros((3, 6, 2, 2))
    seen = {"left": 0, "clamped": 0, "ends": 0}
    for _ in range(60):
        torch.testing.assert_close(x.carry["summary"], torch.tensor(np.concatenate([explains, pursued], 3)).float())
        w, c, _ = play(x, 1)
        acts, present = likelihoods(x, w.board[:, 0], w.prey[:, 0], w.time[:, 0])
        for m, e, k in np.ndindex(3, 6, 2):
            belief = bayes(explains[m, e, k], pursued[m, e, k])
            assert c.goals[m, 0, e, 2 * k : 2 * k + 2].tolist() == pytest.approx(belief, abs=1e-4)
            scores = acts[m, e, k, :, int(w.joint[m, 0, e, 1 + k])].tolist()
            if present[m, e, k]:
                explains[m, e, k] += [max(-10.0, score) for score in scores]
                seen["clamped"] += min(scores) < -10
            else:
                seen["left"] += 1
            if w.done[m, 0, e]:
                pursued[m, e, k] = 0.7 * (pursued[m, e, k] + bayes(explains[m, e, k], pursued[m, e, k])) if remembers else 0
                explains[m, e, k] = 0
                seen["ends"] += 1
    assert all(count > 5 for count in seen.values()), seen


def test_a_player_who_goes_for_the_stag_is_believed_to():
    """MOA that knows: of two actions, goal 0 (stag) does the first, goal 1 (hare) the second, nine times out of ten."""
    args = args_of(method="hop", memory_discount=0.5)
    acts = torch.full((1, 1, 1, 2, 7), 0.02).log()
    acts[..., 0, 2] = acts[..., 1, 3] = math.log(0.9)
    thought = hop.Thought(None, None, acts.flatten(3).flatten(1, 2), torch.ones(1, 1, 1, dtype=torch.bool), None)
    over, summary = torch.zeros(1, 1, dtype=torch.bool), torch.zeros(1, 1, 1, 4)
    for action, expected in ((2, 45 / 46), (3, 1 / 2), (3, 1 / 46)):
        summary = hop.remember(args, None, None, thought, torch.tensor([[[0, action]]]), summary, over)
        belief = hop.believe(args, None, None, summary[:, 0]).exp()
        assert float(belief[0, 0, 0]) == pytest.approx(expected, abs=1e-5)
    summary = hop.next_game(args, summary)
    torch.testing.assert_close(summary[0, 0, 0], torch.tensor([0, 0, 0.5 * 1 / 46, 0.5 * 45 / 46]))
    belief = hop.believe(args, None, None, summary[:, 0]).exp()[0, 0, 1]
    assert float(belief) == pytest.approx((1 + 45 / 92) / (2 + 1 / 2)), "what it hunted before is the next game's prior"


def test_goals_are_learned_from_the_prey_that_was_taken():
    x = outspoken(experiment(method="hop", num_envs=24, planner="none", seats="learner,mixed,nearest_stag"))
    w, _, _ = play(x, 9)
    ours = hop.subgoal_losses(x.args, x.env, x.nets, w, 0.5, x.generator, False)
    total = weights = 0.0
    kinds = {"stag": 0, "hare": 0, "unknown": 0, "left": 0}
    acts, present = zip(*(likelihoods(x, w.board[:, t], w.prey[:, t], w.time[:, t]) for t in range(9)), strict=True)
    for e, k in np.ndindex(24, 2):
        first = 0
        for t in range(9):
            if not w.done[0, t, e] and t < 8:
                continue
            steps, first = range(first, t + 1), t + 1  # one game
            prey = [int(w.joint[0, u, e, 1 + k]) for u in steps if w.left[0, u, e, 1 + k]]
            if not prey:
                kinds["unknown"] += 1
                continue
            goal = {HUNT_STAG: 0, HUNT_HARE: 1}[prey[0]]
            kinds["stag" if goal == 0 else "hare"] += 1
            counted = [u for u in steps if present[u][0, e, k]]
            kinds["left"] += len(steps) - len(counted)
            losses = [-float(acts[u][0, e, k, goal, int(w.joint[0, u, e, 1 + k])]) for u in counted]
            total, weights = total + sum(losses) / len(losses), weights + 1.0  # each game weighs the same
    assert all(count > 2 for count in kinds.values()), kinds
    assert ours["moa"].item() == pytest.approx(total / weights, rel=1e-4) and torch.equal(ours["moa"], ours["total"])


# ---------------------------------------------------------------------------------------------------------------------
# The loop


PLAYED = [{}, {"root": "gumbel", "num_trees": 1}, {"method": "hop", "seats": "learner,random,learner"}]


@pytest.mark.parametrize("changes", PLAYED)
def test_learners_play_what_they_searched(changes):
    x = outspoken(experiment(num_envs=8, **changes))
    plan, plans = hop.plan, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hop, "plan", lambda *given: (plans.append(plan(*given)), plans[-1])[1])
        w, c, _ = play(x, 8)
    assert len(plans) == 8
    moved = 0.0
    for t, found in enumerate(plans):
        assert torch.equal(c.log_probs[:, t], found.log_probs) and torch.equal(c.found[:, t], found.found)
        assert (found.played.gather(2, w.joint[:, t, :, :1].long()) > 0).all()
        inputs = x.nets.policy.inputs(w.board[:, t], w.time[:, t] / 6, w.last_joint[:, t], c.goals[:, t])
        own, value = x.nets.policy(inputs, c.legal[:, t])
        torch.testing.assert_close(c.value[:, t], value)
        moved += (own.exp() - found.log_probs.exp()).abs().sum(2).max().item()
    assert moved > 1
    batch = hop.real_batch(x, w, c)
    torch.testing.assert_close(batch["search_probs"], c.log_probs.exp().flatten(1, 2))
    torch.testing.assert_close(batch["log_prob"], c.log_probs.gather(3, w.joint[..., :1].long()).flatten(1))
    assert torch.equal(batch["distilled"], hop.present_weight(CONFIG, w.board).float().flatten(1))


def test_what_searches_report_counts_only_learners_on_the_board(monkeypatch):
    x, rollout, seen = outspoken(experiment(num_envs=64)), hop.rollout, []
    monkeypatch.setattr(hop, "rollout", lambda *given, **more: (seen.append(rollout(*given, **more)), seen[-1])[1])
    hop.iterate(x, True, True)
    (w, c, _), figures = seen[0], hop.read_totals(x)
    present = w.board[:, :, :, 0].flatten(3).amax(3) > 0
    assert not present.all()
    for i, name in enumerate(("gain", "kl", "depth")):
        expected = [float(c.found[m, ..., i][present[m]].mean()) for m in range(3)]
        assert figures[f"search/{name}"].tolist() == pytest.approx(expected, rel=1e-4) and min(expected) > 0


def improved(x, batch, seed=9, **changes):
    """A copy of the policy after `improve`, and the figures"""
    args, policy = dataclasses.replace(x.args, **changes), copy.deepcopy(x.nets.policy)
    optimiser = hop.Adam(policy.parameters(), args.learning_rate, CPU)
    return policy, hop.improve(args, policy, optimiser, batch, seeded(seed))


def policy_on(policy, batch):
    return policy(batch["inputs"], batch["legal"])[0].detach()


def surprise(policy, batch):
    """cross-entropy to the search's policy [M]"""
    loss = -(batch["search_probs"] * policy_on(policy, batch).clamp(min=-50)).sum(2)
    return (loss * batch["weight"]).sum(1) / batch["weight"].sum(1)


def test_the_policy_learns_what_the_search_found():
    x = outspoken(experiment(num_envs=16))
    w, c, _ = play(x, 8)
    batch = hop.real_batch(x, w, c)
    before = surprise(x.nets.policy, batch)
    once = {"update_epochs": 1, "num_minibatches": 1, "learning_rate": 1e-12}
    _, figures = improved(x, batch, **once)
    for name in ("policy", "distill"):
        torch.testing.assert_close(figures[name], before)
    policy, _ = improved(x, batch, update_epochs=30, ent_coef=0.0, learning_rate=3e-3)
    after = surprise(policy, batch)
    entropy = -(batch["search_probs"] * batch["search_probs"].clamp(min=1e-30).log()).sum(2) * batch["weight"]
    assert ((after - before) < -0.3 * (before - entropy.sum(1) / batch["weight"].sum(1))).all()
    nonsense = batch | {"advantage": -batch["advantage"] + 3, "action": torch.zeros_like(batch["action"])}
    other, _ = improved(x, nonsense, update_epochs=2)
    same, _ = improved(x, batch, update_epochs=2)
    assert all(torch.equal(p, q) for p, q in zip(other.parameters(), same.parameters(), strict=True)), "no PPO is left"


def test_ppo_compares_with_what_was_played_by():
    x = outspoken(experiment(num_envs=8, policy_loss="ppo"))
    w, c, _ = play(x, 8)
    batch = hop.real_batch(x, w, c)
    assert (batch["distilled"] == 0).all()
    _, figures = improved(x, batch, update_epochs=1, num_minibatches=1, learning_rate=1e-12)
    own, played_by, weight = policy_on(x.nets.policy, batch), c.log_probs.flatten(1, 2), batch["weight"]

    def mean(y):
        return (y * weight).sum(1) / weight.sum(1)

    log_ratio = (own - played_by).gather(2, batch["action"].long()[..., None])[..., 0]
    ratio = log_ratio.exp()
    advantage = batch["advantage"] - mean(batch["advantage"])[:, None]
    advantage = advantage / (mean(advantage.square()).sqrt()[:, None] + 1e-8)
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    torch.testing.assert_close(figures["policy"], -mean(gain), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(figures["approx_kl"], mean(ratio - 1 - log_ratio), atol=1e-4, rtol=1e-4)
    assert (figures["approx_kl"] > 1e-3).all() and (figures["distill"] == 0).all()


@pytest.mark.parametrize("policy_loss", ["distill", "ppo"])
def test_imagined_samples_are_never_distilled(policy_loss, monkeypatch):
    x, improve, seen = experiment(imagination=True, policy_loss=policy_loss), hop.improve, []
    monkeypatch.setattr(hop, "improve", lambda a, p, o, batch, g: (seen.append(batch), improve(a, p, o, batch, g))[1])
    hop.iterate(x, True, True)
    batch = seen[0]
    real = batch["real"] > 0
    assert (batch["weight"][~real] > 0).any() and (batch["distilled"][~real] == 0).all()
    assert (batch["search_probs"][~real] == 0).all()
    expected = batch["weight"][real] if policy_loss == "distill" else torch.zeros_like(batch["weight"][real])
    assert torch.equal(batch["distilled"][real], expected) and batch["weight"][real].any()
    learned = improved(x, batch, num_minibatches=1, update_epochs=1)[0]
    changed = batch | {"advantage": torch.where(real, batch["advantage"], -batch["advantage"])}
    other = improved(x, changed, num_minibatches=1, update_epochs=1)[0]
    pairs = zip(learned.actor.parameters(), other.actor.parameters(), strict=True)
    assert any((p != q).any() for p, q in pairs), "they are still learned from by PPO"


def test_what_was_played_by_chance_does_not_disturb_distillation(monkeypatch):
    """A searched action may be one that the search's policy hardly ever plays: then the ratio of PPO, which distillation does
    not use, is beyond all numbers."""
    x, improve, seen = experiment(imagination=True), hop.improve, []
    monkeypatch.setattr(hop, "improve", lambda a, p, o, batch, g: (seen.append(batch), improve(a, p, o, batch, g))[1])
    hop.iterate(x, True, True)
    batch = seen[0]
    rare = batch | {"log_prob": torch.where(batch["distilled"] > 0, -200.0, batch["log_prob"])}
    rare["advantage"] = torch.where(batch["distilled"] > 0, 100.0, batch["advantage"])  # nor does PPO's normalisation see it
    (ours, losses), (theirs, _) = (improved(x, b, num_minibatches=1, update_epochs=1)[:2] for b in (rare, batch))
    assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert all(value.isfinite().all() for value in losses.values()) and losses["approx_kl"].abs().max() < 1


# ---------------------------------------------------------------------------------------------------------------------
# From end to end


def run(run_dir, script=hop, **changes):
    """Flags of the search are left out where the script has none."""
    known = {field.name for field in dataclasses.fields(script.Args)}
    flags = {key: value for key, value in {**TINY, "run_dir": str(run_dir), **changes}.items() if key in known}
    return script.main(script.Args(**flags))


@pytest.fixture
def no_pictures(monkeypatch):
    for script in (hop, ppo):
        for name in ("draw_pictures", "film"):
            monkeypatch.setattr(script, name, lambda *_: None)


def same_contents(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_contents(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same_contents(x, y) for x, y in zip(a, b, strict=True))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("method", ["ppo", "ppo-omg", "hopplus"])
def test_without_search_it_has_the_other_scripts_defaults(method):
    theirs = dataclasses.asdict(ppo.resolved(ppo.Args(method=method, device="cpu")))
    ours = dataclasses.asdict(hop.resolved(hop.Args(method=method, device="cpu")))
    assert {key: ours[key] for key in theirs if key != "exp_name"} == {k: v for k, v in theirs.items() if k != "exp_name"}
    assert ppo.BY_DEVICE["cuda"].items() <= hop.BY_DEVICE["cuda"].items()


def test_without_search_it_is_the_other_script(tmp_path, no_pictures):
    found = []
    for script in (ppo, hop):
        figures = run(tmp_path / script.__name__, script, method="hopplus", planner="none")
        tensors = torch.load(figures["checkpoint"], weights_only=True)["tensors"]
        found.append((without_times(lines_of(Path(figures["checkpoint"]).parent)), tensors))
    (theirs, tensors), (ours, our_tensors) = found
    assert len(ours) == len(theirs) == 2
    for line, expected in zip(ours, theirs, strict=True):
        assert {key: line[key] for key in expected} == expected
        assert set(line) - set(expected) <= {"losses/distill"} and line.get("losses/distill", 0.0) == 0.0
    for key in tensors:
        assert same_contents(tensors[key], our_tensors[key]), key


TAGS = {"search/gain", "search/kl", "search/depth", "losses/distill", "losses/policy", "losses/moa", "moa/nll"}
PHASES = {"select", "expand", "subgoal", "moa", "network", "backup"}
WALLS = dataclasses.replace(CONFIG, height=5, width=5, max_wall_pieces=1, strengths=(1.0, 2.0, 3.0), time_reward=-0.1)
VARIANTS = {
    "gumbel": {"root": "gumbel", "num_seeds": 2},
    "inferred in the tree": {"infer_in_tree": True},
    "hop by ppo": {"method": "hop", "policy_loss": "ppo", "num_trees": 2},
    "imagination": {"imagination": True, "wm_ensemble": 2},
    "shared, no subgoals": {"share_parameters": True, "seats": "learner,random,learner", "subgoals": "none", "root": "gumbel"}
    | {"inter_episode_belief": False, "imagination": True},
    "oracle": {"subgoals": "oracle", "seats": "learner,nearest_stag,mixed", "infer_in_tree": True, "search_model": "env"},
    "hindsight": {"subgoals": "hindsight", "goal_kind": "discrete", "num_goals": 3},
    "pixel prosocial": {"wm_head": "pixel", "config": dataclasses.replace(CONFIG, prosocial=True)},
    "one-step among walls": {"planner": "one-step", "search_model": "env", "config": WALLS},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_variants_run_and_log_what_the_search_does(changes, tmp_path, no_pictures):
    figures = run(tmp_path, **{"num_steps": 7, "total_steps": 28, "pretraining_updates": 2, "num_simulations": 3, **changes})
    may_be = ("moa/recall", "moa/precision", "checkpoint")
    assert [k for k, v in figures.items() if not k.startswith(may_be) and not math.isfinite(v)] == []
    (line,), *others = (lines_of(folder) for folder in sorted(tmp_path.iterdir()))
    assert len(others) == changes.get("num_seeds", 1) - 1
    assert all(without_times(other) != without_times([line]) for other in others), "every seed is another run"
    assert set(line) >= TAGS | {f"time/{phase}" for phase in PHASES}
    assert all(line[f"time/{phase}"] >= 0 for phase in PHASES) and line["search/kl"] > 0 and line["search/gain"] > 0
    assert (line["losses/distill"] > 0) == (changes.get("policy_loss") != "ppo")
    nets = torch.load(figures["checkpoint"], weights_only=True)["tensors"]["nets"]
    assert all(tensor.isfinite().all() for net in nets.values() for tensor in net.values())


POISONED = [("policy", "puct"), ("world", "gumbel"), ("moa", "puct"), ("moa", "gumbel"), ("nothing", "gumbel")]


@pytest.mark.parametrize(("part", "root"), POISONED)
def test_not_a_number_stops_the_run(part, root, tmp_path, monkeypatch, no_pictures):
    """On every machine: no cast meets one on its way through the search, nor in a run without"""
    iterate, calls = hop.iterate, []

    def poisoned(x, *key):
        calls.append(part)
        if len(calls) == 2 and part != "nothing":
            net = {"policy": x.nets.policy.actor, "world": x.nets.world, "moa": x.nets.models.moa}[part]
            with torch.no_grad():
                list(net.parameters())[-2].fill_(math.nan)
        return iterate(x, *key)

    monkeypatch.setattr(hop, "iterate", poisoned)
    changes = {"num_steps": 6, "total_steps": 3 * 24, "num_simulations": 4, "pretraining_updates": 2, "root": root}
    with NoNonFiniteCasts() as seen:
        if part == "nothing":
            assert math.isfinite(run(tmp_path, **changes)["losses/policy"])
        else:
            with pytest.raises(FloatingPointError, match=r"losses/.* is .* at iteration 2") as error:
                run(tmp_path, **changes)
            assert str(next(tmp_path.glob("*/checkpoint_bad.pt"))) in str(error.value) and len(calls) == 2
    assert seen.casts > 0


def test_a_tree_that_cannot_be_drawn_costs_nothing(tmp_path, monkeypatch, capsys):
    changes = {"num_steps": 6, "total_steps": 3 * 24, "num_simulations": 4, "pretraining_updates": 2, "picture_every": 1}
    with monkeypatch.context() as patch:
        for name in ("draw_pictures", "film"):
            patch.setattr(hop, name, lambda *_: None)
        plan, whole = hop.plan, run(tmp_path / "whole", **changes)

    def drawing(x, s, draw=hop.draw_tree):
        with monkeypatch.context() as patch:
            patch.setattr(hop, "plan", lambda *given: (plan(*given), [].pop()))
            return draw(x, s)

    monkeypatch.setattr(hop, "draw_tree", drawing)
    figures = run(tmp_path / "failing", **changes)
    assert capsys.readouterr().out.count("could not draw: IndexError: pop from empty list; the run goes on\n") == 3
    first, second = (torch.load(path.pop("checkpoint"), weights_only=True) for path in (whole, figures))
    assert second["iteration"] == 3 and same_contents(first["tensors"], second["tensors"])
    assert figures == pytest.approx(whole, rel=0, abs=0, nan_ok=True)


RESUMED = {"hopplus-mcts": {"seats": "learner,mixed,learner", "num_trees": 1}, "hop": {"subgoal_period": 2, "num_trees": 2}}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("method", RESUMED)
def test_resumed_run_is_the_same_bit_for_bit(method, device, tmp_path, monkeypatch, no_pictures):
    changes = {"method": method, "device": device, "total_steps": 3 * 24, "num_steps": 6, "save_every": 1, **RESUMED[method]}
    changes |= {"num_simulations": 4, "pretraining_updates": 4}
    whole = run(tmp_path / "whole", **changes)
    save, calls = hop.save_atomically, []

    def killed_at_the_second(path, content):
        calls.append(path)
        if len(calls) == 2:  # its lines are already in metrics.jsonl, its checkpoint is not
            raise KeyboardInterrupt
        save(path, content)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(hop, "save_atomically", killed_at_the_second)
        torch.manual_seed(77)  # the global generator does not matter
        run(tmp_path / "killed", **changes)
    (checkpoint,) = (tmp_path / "killed").glob("*/checkpoint.pt")
    lines = without_times(lines_of(Path(whole["checkpoint"]).parent))
    assert without_times(lines_of(checkpoint.parent)) == lines[:2], "the same seed gives the same log"
    assert torch.load(checkpoint, weights_only=True)["iteration"] == 1
    resumed = hop.main(hop.Args(resume=str(checkpoint), device=device, seed=5))
    first, second = (torch.load(path, weights_only=True) for path in (whole.pop("checkpoint"), resumed.pop("checkpoint")))
    for key in first["tensors"]:
        assert same_contents(first["tensors"][key], second["tensors"][key]), key
    assert resumed == pytest.approx(whole, rel=0, abs=0, nan_ok=True) and second["iteration"] == 3
    assert without_times(lines_of(checkpoint.parent)) == lines and len(lines) == 3


REFUSED = [  # flags, what the error must name
    ({"gamma": 0.0}, ["--gamma 0.0", "--max-depth 32"]),
    ({"root": "gumbel", "policy_loss": "ppo"}, ["--policy-loss ppo", "--root gumbel"]),
    ({"profile": True, "resume": "missing"}, ["--resume", "--profile", "exclude"]),
    ({"adapt_modes": ()}, ["--adapt-modes"]),
    ({"num_simulations": 0}, ["--num-simulations", "0"]),
    ({"num_trees": 0}, ["--num-trees", "0"]),
    ({"max_depth": 0}, ["--max-depth", "0"]),
    ({"puct": -1.0}, ["--puct", "-1.0"]),
    ({"puct": math.nan}, ["--puct", "nan"]),
    ({"search_prior": -0.5}, ["--search-prior", "-0.5"]),
    ({"q_temperature": 0.0}, ["--q-temperature", "0.0"]),
    ({"subgoals": "bayes", "goal_kind": "discrete", "num_goals": 3}, ["--subgoals bayes", "--num-goals 2"]),
    ({"subgoals": "bayes"}, ["--subgoals bayes", "--goal-kind discrete"]),
    ({"method": "hop", "num_goals": 3}, ["--subgoals bayes", "--num-goals 2"]),
    ({"subgoals": "hindsight", "policy_loss": "ppo"}, ["--subgoals hindsight", "--policy-loss ppo"]),
    ({"method": "ppo", "inter_episode_belief": True}, ["--inter-episode-belief", "search"]),
    ({"config": dataclasses.replace(CONFIG, prosocial=True)}, ["--prosocial", "pixel"]),
    ({"share_parameters": True, "config": dataclasses.replace(CONFIG, strengths=(1.0, 2.0, 3.0))}, ["--strengths"]),
    ({"search_model": "env", "world_model_checkpoint": "missing"}, ["--world-model-checkpoint", "--search-model"]),
    ({"resume": "missing"}, ["there is no", "missing"]),
    ({"evaluate": "missing"}, ["there is no", "missing"]),
    ({"adapt": "missing"}, ["there is no", "missing"]),
]


@pytest.mark.parametrize(("flags", "words"), REFUSED, ids=[" ".join(map(str, f.items()))[:60] for f, _ in REFUSED])
def test_refused_before_anything_is_written(flags, words, tmp_path):
    with pytest.raises(ValueError) as error:
        run(tmp_path / "runs", **flags)
    message = str(error.value)
    assert "\n" not in message and all(word in message for word in words), message
    assert not (tmp_path / "runs").exists()


def test_every_flag_is_read_and_explained():
    source = Path(hop.__file__).read_text()
    _, before, body = re.split(r"^class Args:$|^# -{10,}$", source, maxsplit=2, flags=re.M)
    assert "num_simulations: int" in before and "class StackedLinear" in body
    for field in dataclasses.fields(hop.Args):
        by_name = rf"\b(args|source|trained|plain|saved)\.{field.name}\b"
        assert re.search(by_name, body), f"--{field.name.replace('_', '-')} is read nowhere"
        if field.name != "config":
            line = before.split(f"    {field.name}: ", 1)[1].split("\n", 2)[1]
            assert line.startswith('    """') and len(line) > 15, field.name


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """of every kind of run: {(script, method): path}"""
    with pytest.MonkeyPatch.context() as patch:
        for script, name in itertools.product((hop, ppo), ("draw_pictures", "film")):
            patch.setattr(script, name, lambda *_: None)
        folder, found = tmp_path_factory.mktemp("checkpoints"), {}
        for script, method in ((hop, "hopplus-mcts"), (hop, "ppo-omg"), (ppo, "ppo"), (ppo, "ppo-omg"), (ppo, "hopplus")):
            flags = {"method": method, "total_steps": 32, "pretraining_updates": 2}
            figures = run(folder / f"{script.__name__} {method}", script, **flags)
            found[script.__name__, method] = Path(figures["checkpoint"])
    return found


LOADED = [  # checkpoint, flags, planner and model it searches with
    (("hopplus_mcts", "hopplus-mcts"), {}, "mcts", "world-model"),
    (("hopplus_mcts", "hopplus-mcts"), {"planner": "none"}, "none", "world-model"),
    (("hopplus_mcts", "hopplus-mcts"), {"search_model": "env", "root": "gumbel", "num_trees": 3}, "mcts", "env"),
    (("hopplus_mcts", "ppo-omg"), {}, "none", "env"),
    (("hopplus_mcts", "ppo-omg"), {"planner": "mcts"}, "mcts", "env"),
    (("hopplus_ppo", "ppo-omg"), {}, "mcts", "env"),
    (("hopplus_ppo", "hopplus"), {"planner": "one-step"}, "one-step", "world-model"),
    (("hopplus_ppo", "ppo"), {"planner": "none"}, "none", "env"),
]


@pytest.mark.parametrize(("which", "flags", "planner", "model"), LOADED)
def test_checkpoints_of_both_scripts_are_evaluated_with_and_without_search(which, flags, planner, model, checkpoints):
    path = checkpoints[which]
    _, source = hop.load_run(hop.Args(device="cpu", **flags), str(path))
    assert (source.planner, source.search_model) == (planner, model)
    assert all(getattr(source, name) == value for name, value in flags.items())
    found = hop.main(hop.Args(evaluate=str(path), eval_games=4, device="cpu", num_simulations=2, **flags))
    assert len(found) == 3 and all(0 <= value <= 5 for value in found.values())
    assert (path.parent / ("evaluation.csv" if planner == "none" else "evaluation_search.csv")).exists()


@pytest.mark.parametrize("call", ["evaluate", "adapt"])
def test_no_search_without_a_model_of_the_others(call, checkpoints):
    with pytest.raises(ValueError, match=r"no model of the others to search with .* --planner none"):
        hop.main(hop.Args(**{call: str(checkpoints["hopplus_ppo", "ppo"])}, device="cpu"))


MEETINGS = [
    (("hopplus_mcts", "hopplus-mcts"), {}, ["frozen", "search", "learning"]),
    (("hopplus_mcts", "hopplus-mcts"), {"adapt_modes": ("both",)}, ["both"]),
    (("hopplus_ppo", "hopplus"), {"planner": "none"}, ["frozen", "learning"]),
]


@pytest.mark.parametrize(("which", "flags", "modes"), MEETINGS)
def test_strangers_are_met_with_search_and_without(which, flags, modes, checkpoints, monkeypatch):
    planned, plan, planners = [], hop.plan, []
    meet = hop.meet
    monkeypatch.setattr(hop, "plan", lambda *args: (planned.append(1), plan(*args))[1])
    monkeypatch.setattr(hop, "meet", lambda a, x, *rest: (planners.append(x.args.planner), meet(a, x, *rest))[1])
    small = {
        "adapt_steps": 32,
        "adapt_every": 8,
        "adapt_repetitions": 3,
        "adapt_games": 4,
        "adapt_rounds": 1,
        "num_simulations": 2,
    }
    flags = {
        **small,
        "adapt": str(checkpoints[which]),
        "seats": "learner,nearest_hare,random",
        "adapt_references": False,
        **flags,
    }
    found = hop.main(hop.Args(device="cpu", **flags))
    assert list(found) == [f"{mode}/nearest_hare + random" for mode in modes]
    assert planners == ["mcts" if mode in ("search", "both") else "none" for mode in modes]
    assert len(planned) == 32 * sum(mode in ("search", "both") for mode in modes)
    (row,) = csv.DictReader((checkpoints[which].parent / "adaptation.csv").open())
    assert float(row[f"{modes[-1]} mean"]) == pytest.approx(found[f"{modes[-1]}/nearest_hare + random"])


def test_nobody_would_search(checkpoints):
    flags = {"adapt": str(checkpoints["hopplus_ppo", "hopplus"]), "adapt_modes": ("search",), "planner": "none"}
    with pytest.raises(ValueError, match="--adapt-modes search with --planner none"):
        hop.main(hop.Args(device="cpu", **flags))


def test_profile_says_where_the_time_goes(capsys, tmp_path):
    figures = run(tmp_path / "runs", profile=True, num_envs=2)
    assert {f"time/{phase}" for phase in PHASES} <= set(figures) and figures["simulations_per_second"] > 0
    printed = capsys.readouterr().out
    assert "12 trees, 6 simulations each, on cpu" in printed and all(phase in printed for phase in PHASES)
    assert not (tmp_path / "runs").exists()


def test_a_drawn_tree_leaves_the_run_as_it_is():
    x = experiment(num_envs=3, method="hop")
    play(x, 3)
    before = copy.deepcopy(x.tensors())
    figure = hop.draw_tree(x, 0)
    after = x.tensors()
    assert torch.equal(before["generators"][0], after["generators"][0]) and len(figure.axes) == 2
    assert all(torch.equal(before["carry"][key], after["carry"][key]) for key in after["carry"])
    assert all(torch.equal(a, b) for a, b in zip(before["env"], after["env"], strict=True))


# ---------------------------------------------------------------------------------------------------------------------
# On a GPU


@pytest.mark.cuda
@pytest.mark.parametrize(("root", "trees"), [("puct", 3), ("gumbel", 1), ("gumbel", 3)])
@pytest.mark.parametrize("fused", [False, True])
def test_trees_on_a_gpu_are_those_of_the_cpu(root, trees, fused):
    args = args_of(root=root, gamma=0.9, q_temperature=1.0, num_trees=trees, compile=fused)
    model = Model(BOARDS["4x4"])
    roots = Roots(model, 60 // trees, trees, 16, seed=3)
    cuda = torch.device("cuda")
    there = Model(BOARDS["4x4"], networks=model.networks, device=cuda)
    ours, theirs = grow(args, model, roots), grow(args, there, roots.to(cuda, torch.float64))
    assert torch.equal(ours.edges[:, :-1, [0, 3]], theirs.edges[:, :-1, [0, 3]].cpu())
    torch.testing.assert_close(ours.edges[:, :-1], theirs.edges[:, :-1].cpu(), atol=1e-9, rtol=0)
    torch.testing.assert_close(ours.nodes[:, :-1], theirs.nodes[:, :-1].cpu(), atol=1e-9, rtol=0)
    verdicts = hop.verdict(args, ours, roots.gumbel, trees), hop.verdict(args, theirs, roots.gumbel.to(cuda), trees)
    for one, other in zip(*verdicts, strict=True):
        torch.testing.assert_close(one, other.cpu(), atol=1e-9, rtol=0)


@pytest.mark.cuda
def test_rules_in_fewer_kernels_are_the_same():
    env, caught = StagHuntEnv(BOARDS["4x4"], 256, "cuda", 6), False
    n, args, rows = env.config.num_players, args_of(device="cuda", compile=True), torch.arange(256, device="cuda")
    for step in range(12):
        state, seat = env.state, (rows + step) % n
        joint, prey = torch.randint(NUM_ACTIONS, (256, n), device="cuda"), state.prey_position.long()
        position = hop.Position(env.observe(state)[rows, seat], state.time, state.first_hunt, None, None, None)
        both = hop.rules, hop.fused(hop.rules, args, env.device)
        found = [function(env, position, prey, joint, seat) for function in both]
        assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
        caught |= bool((found[0][0][:, -2:] < position.board[:, -2:]).any())
        env.step(joint.gather(1, env.unego[seat]))
    assert caught


ON_GPU = {
    "hopplus-mcts": {},
    "gumbel": {"root": "gumbel", "search_model": "env", "num_trees": 1},
    "hop": {"method": "hop", "num_trees": 2},
    "inferred in the tree": {"infer_in_tree": True, "seats": "learner,mixed,random"},
    "one-step": {"planner": "one-step", "imagination": True},
}


@pytest.mark.cuda
@pytest.mark.parametrize("changes", ON_GPU.values(), ids=ON_GPU)
def test_captured_iterations_equal_eager_ones(changes, tmp_path, no_pictures):
    found = []
    for cudagraphs in (False, True):
        flags = {"device": "cuda", "cudagraphs": cudagraphs, "total_steps": 6 * 32, "subgoal_period": 2, **changes}
        figures = run(tmp_path / str(cudagraphs), **flags)
        logged = without_times(lines_of(Path(figures["checkpoint"]).parent))
        found.append({**torch.load(figures["checkpoint"], weights_only=True)["tensors"], "logged": logged})
    for key in found[0]:
        assert same_contents(found[0][key], found[1][key]), key


@pytest.mark.cuda
@pytest.mark.parametrize("changes", ON_GPU.values(), ids=ON_GPU)
def test_an_iteration_never_waits_for_the_host(changes):
    x = experiment(rehearsed=4, device=torch.device("cuda"), **changes)
    for _ in range(2):
        hop.iterate(x, x.nets.world is not None, True)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        hop.iterate(x, x.nets.world is not None, True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
