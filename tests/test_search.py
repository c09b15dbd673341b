"""Acting by search: trees are those of a plain-Python search, its models are the game's, and it trains the policy."""

import dataclasses
import functools
import itertools
import math
import random
import shutil
from pathlib import Path

import hopplus_mcts as hop
import hopplus_ppo as ppo
from stag_hunt_env import HUNT_HARE, HUNT_STAG, NUM_ACTIONS, StagHuntConfig, StagHuntEnv, State, seats_table

import numpy as np
import pytest
import reference_game
import reference_search as reference
import torch
from helpers import (
    PRETRAINING_CASES,
    assert_same,
    chi_square_p,
    games_of,
    lines_of,
    mixed_actions,
    random_kinds,
    seeded,
    without_times,
)

CPU = torch.device("cpu")
CONFIG = StagHuntConfig(height=3, width=4, num_players=3, num_hares=3, final_time=6)
TINY = {
    **{"device": "cpu", "config": CONFIG, "num_envs": 4, "num_steps": 8, "total_timesteps": 64, "log_every": 1},
    **{"policy_hidden": 16, "update_epochs": 2, "num_minibatches": 2, "subgoal_hidden": 8, "subgoal_batch_size": 2},
    **{"wm_hidden": 16, "wm_batch_size": 16, "pretraining_updates": 8, "pretraining_games": 4, "replay_rollouts": 2},
    **{"imagination_horizon": 4, "trust_exact_match": 0.0, "num_simulations": 6, "num_trees": 2, "num_pictures": 0},
}


def make_args(script=hop, **changes):
    return script.make_args(**{"method": "hopplus-mcts", **TINY, **changes})


def silent(name):
    pass


# ---------------------------------------------------------------------------------------------------------------------
# The batched search and the plain one grow the same trees


class Numbers:
    """Networks that say something else about every position: numbers drawn from what stands there. Half of the
    positions have the legal actions of the game, the others any. Values grow with the highest payoff."""

    def __init__(self, config):
        self.config, self.known, self.scale = config, {}, max(map(abs, config.payoffs()))

    def __call__(self, game, seat, tree, last_joint):
        key = (seat, game.position, game.present, game.prey, game.alive, sorted(game.walls), game.time, game.first_hunt)
        key = repr((*key, tuple(last_joint)))
        if (key, tree) not in self.known:
            self.known[key, tree] = self.said(game, seat, tree, key)
        return self.known[key, tree]

    def said(self, game, seat, tree, key):
        r = random.Random(key)
        legal = sorted(reference_game.legal_actions(self.config, game, seat))
        if r.random() < 0.5:
            legal = sorted(r.sample(range(NUM_ACTIONS), r.randint(1, NUM_ACTIONS)))
        policy = reference.softmax({action: r.gauss(0, 1.5) for action in legal})
        logits, value = {action: math.log(p) for action, p in policy.items()}, r.uniform(-0.4, 1.2) * self.scale
        r = random.Random(f"{key}, {tree}")  # each tree expects something else of the others
        expected = []
        for _ in range(self.config.num_players - 1):
            weights = [r.random() * (r.random() < 0.7) for _ in range(NUM_ACTIONS)]
            weights[r.randrange(NUM_ACTIONS)] += 0.1
            expected.append([weight / sum(weights) for weight in weights])
        return reference.Said(logits, value, expected)


class Model:
    """The same game and networks for both searches. A position of the plain search is (game, seat, tree, last joint
    action); of the batched one, `history` holds these numbers in a row."""

    def __init__(self, config, dtype=torch.float64):
        self.config, self.env, self.dtype, self.networks = config, StagHuntEnv(config), dtype, Numbers(config)

    def network(self, position):  # the plain search's
        return self.networks(*position)

    def step(self, position, joint):  # the plain search's
        game, seat, tree, _ = position
        n = self.config.num_players
        after = reference_game.Game(*(list(x) if isinstance(x, list) else x for x in vars(game).values()))
        rewards, _, over = reference_game.step(self.config, after, [joint[(i - seat) % n] for i in range(n)])
        return (after, seat, tree, joint), float(rewards[seat]), over or not after.present[seat]

    def pack(self, state, seat, tree, joint):
        """State of T games, seat, tree [T] -> Position"""
        fields = (x.flatten(1).long() if x.dim() > 1 else x.long()[:, None] for x in state)
        row = torch.cat([seat[:, None], tree[:, None], *fields], 1)
        return hop.Position(torch.zeros(len(seat), 0), state.time, state.first_hunt, joint, row)

    def unpack(self, position):
        n, p = self.config.num_players, self.config.num_prey
        seat, tree, *fields = position.history.split([1, 1, n, n, p, p, self.config.num_cells, 1, 1], 1)
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
        numbers = (logits, [x.value for x in said], [x.expected for x in said])
        return tuple(torch.tensor(x, dtype=self.dtype) for x in numbers)


def random_states(env, generator):
    """Games of every age, some over"""
    kinds, state = random_kinds(env, generator), env.initial_state()
    age = torch.randint(env.config.final_time + 1, (env.num_envs,), generator=generator)
    for t in range(int(age.max())):
        after, *_ = env.transition(state, mixed_actions(env, state, kinds, 0.2, generator))
        go_on = t < age
        pairs = zip(state, after, strict=True)
        state = State(*(torch.where(go_on.view(-1, *[1] * (x.dim() - 1)), y, x) for x, y in pairs))
    return state


class Roots:
    """`decisions` random positions, each the root of `trees` trees, with the random numbers of their searches"""

    def __init__(self, model, decisions, trees, simulations, seed):
        generator, config = seeded(seed), model.config
        env = StagHuntEnv(config, decisions, seed=seed)
        rows = torch.arange(decisions).repeat_interleave(trees)
        state = State(*(x[rows] for x in random_states(env, generator)))
        seat = torch.randint(config.num_players, (decisions,), generator=generator)[rows]
        joint = torch.randint(NUM_ACTIONS, (decisions, config.num_players), generator=generator)[rows]
        self.position = model.pack(state, seat, torch.arange(trees).repeat(decisions), joint)
        self.ended = env.game_over(state) | ~state.present.gather(1, seat[:, None])[:, 0]
        shape = (simulations, decisions * trees, config.num_players - 1)
        self.uniform = torch.rand(shape, dtype=torch.float64, generator=generator).to(model.dtype)
        gumbel = torch.rand(decisions, NUM_ACTIONS, dtype=torch.float64, generator=generator)
        self.gumbel = -(-gumbel.log()).log()[rows].to(model.dtype)

    def only(self, rows):
        found = object.__new__(Roots)
        found.position = hop.Position(*(x[rows] for x in self.position))
        found.ended, found.uniform, found.gumbel = self.ended[rows], self.uniform[:, rows], self.gumbel[rows]
        return found


def grow(args, model, roots):
    scale = max(map(abs, model.config.payoffs()))
    callbacks = (model.advance, model.evaluate)
    return hop.search(args, scale, roots.position, roots.ended, *callbacks, roots.uniform, roots.gumbel, silent)


def assert_same_tree(row, tree, plain):
    """Row `row` of a batched tree and a plain one"""
    edges, stats, joint = tree.edges[row].tolist(), tree.stats[row].tolist(), tree.position.last_joint[row].tolist()
    pointed_at = set()
    for number in range(len(edges) - 1):  # the last one is the spare node
        visits, total, logits, child = edges[number]
        if number not in plain:
            assert not any(visits), f"row {row}: node {number} was visited"
            continue
        node, where = plain[number], f"row {row}, node {number}"
        assert {a: int(n) for a, n in enumerate(visits) if n} == {a: n for a, n in node.visits.items() if n}, where
        assert {a: int(c) for a, c in enumerate(child) if c} == node.child, where
        assert {a for a, logit in enumerate(logits) if logit > hop.ILLEGAL / 2} == set(node.said.logits), where
        for action in node.tried():
            assert total[action] / visits[action] == pytest.approx(node.q(action), abs=1e-9), where
        assert stats[number][0] == pytest.approx(node.value, abs=1e-12) and stats[number][2] == node.ended, where
        if number:
            assert stats[number][1] == node.reward and tuple(joint[number]) == node.joint, where
        pointed_at |= set(node.child.values())
    assert pointed_at | {0} == set(plain)


def compare(args, model, roots, simulations):
    names = ("root", "planner", "puct", "gamma", "q_temperature", "search_prior", "max_depth")
    scale, trees = max(map(abs, model.config.payoffs())), args.num_trees
    settings = reference.Settings(**{name: getattr(args, name) for name in names}, scale=scale)
    tree = grow(args, model, roots)
    log_probs, played, visits, q = hop.root_policy(args, scale, tree, roots.gumbel, trees)
    state, seats, numbers = model.unpack(roots.position)
    joints = [tuple(x) for x in roots.position.last_joint.tolist()]
    depths, repeated, plain = [], 0, []
    for row, position in enumerate(zip(games_of(state), seats.tolist(), numbers.tolist(), joints, strict=True)):
        noise = roots.uniform[:, row].tolist(), roots.gumbel[row].tolist()
        plain.append(reference.search(settings, position, bool(roots.ended[row]), model.network, model.step, *noise))
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
        assert repeated > 5 and max(depths) > (1.4 if args.max_depth == 2 else 2.0)


BOARDS = {
    "4x4": StagHuntConfig(num_players=3, num_hares=3, final_time=7, time_reward=-0.1),
    "3x5": StagHuntConfig(height=3, width=5, num_players=2, num_stags=2, num_hares=2, final_time=6, max_wall_pieces=1),
}
COMPARED = [  # root, board, max_depth, num_trees, simulations, other flags
    ("puct", "4x4", 32, 1, 18, {}),
    ("puct", "4x4", 2, 3, 16, {"puct": 2.5, "gamma": 0.8}),
    ("puct", "3x5", 3, 1, 20, {"search_prior": 0.0, "q_temperature": 3.5}),
    ("gumbel", "4x4", 32, 1, 20, {"search_prior": 0.0}),
    ("gumbel", "3x5", 3, 1, 5, {"q_temperature": 10.0}),
    ("gumbel", "3x5", 32, 3, 16, {"q_temperature": 2.0}),
]


@pytest.mark.parametrize(("root", "board", "max_depth", "trees", "simulations", "flags"), COMPARED)
def test_trees_are_those_of_the_plain_search(root, board, max_depth, trees, simulations, flags):
    flags = {"gamma": 0.9, "q_temperature": 5.0, **flags}
    args = make_args(root=root, max_depth=max_depth, num_trees=trees, num_simulations=simulations, **flags)
    model = Model(BOARDS[board])
    compare(args, model, Roots(model, 84 // trees, trees, simulations, seed=simulations + max_depth), simulations)


@pytest.mark.parametrize(("root", "trees"), [("puct", 3), ("gumbel", 1)])
def test_one_step_ahead_tries_each_legal_action_once(root, trees):
    args = make_args(root=root, planner="one-step", num_trees=trees, gamma=0.7, q_temperature=4.0, search_prior=0.6)
    model = Model(BOARDS["4x4"])
    compare(args, model, Roots(model, 60 // trees, trees, NUM_ACTIONS, seed=5), NUM_ACTIONS)


@pytest.mark.parametrize("root", ["puct", "gumbel"])
def test_rows_do_not_influence_each_other(root):
    """Other masks, ends and boards in every row; alone, shuffled or fewer, each grows the same tree"""
    args, model = make_args(root=root, gamma=0.9, q_temperature=5.0, max_depth=5), Model(BOARDS["4x4"], torch.float32)
    roots = Roots(model, 12, 1, 16, seed=3)
    together = grow(args, model, roots)
    assert len({tuple(row) for row in (together.edges[:, 0, 2] > hop.ILLEGAL / 2).tolist()}) > 5, "masks differ"
    shuffled = torch.randperm(12, generator=seeded(1))
    for rows in (*(torch.tensor([row]) for row in range(0, 12, 3)), shuffled, shuffled[:5]):
        found = grow(args, model, roots.only(rows))
        for name in ("edges", "stats", "best", "best_child", "opponent_probs"):
            assert torch.equal(getattr(found, name)[:, :-1], getattr(together, name)[rows][:, :-1]), name
        ours, theirs = (
            hop.root_policy(args, 5.0, *x, 1) for x in ((found, roots.gumbel[rows]), (together, roots.gumbel))
        )
        assert all(torch.equal(x, y[rows]) for x, y in zip(ours, theirs, strict=True))


def test_paths_longer_than_need_be_change_nothing():
    """--compile walks to one of four depths"""
    model, roots, trees = Model(BOARDS["4x4"]), None, []
    roots = Roots(model, 30, 1, 18, seed=4)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("gumbel_root_action", "select_path", "path_returns", "update_best"):
            patch.setattr(hop, name, getattr(hop, name).__wrapped__)  # as it is, not compiled
        for compiled in (False, True):
            trees.append(grow(make_args(gamma=0.9, q_temperature=5.0, compile=compiled), model, roots))
    for name in ("edges", "stats", "best", "best_child"):
        assert torch.equal(*(getattr(tree, name)[:, :-1] for tree in trees)), name
    assert not torch.equal(trees[0].edges[:, -1], trees[1].edges[:, -1]), "the spare node is visited more often"


@pytest.mark.parametrize(("root", "trees"), [("puct", 3), ("gumbel", 1)])
def test_payoffs_a_hundred_times_smaller_make_no_difference(root, trees):
    args, found = make_args(root=root, num_trees=trees), []
    rewards = ("stag_reward", "hare_reward", "time_reward")
    smaller = {name: getattr(BOARDS["4x4"], name) / 100 for name in rewards}
    for config in (BOARDS["4x4"], dataclasses.replace(BOARDS["4x4"], **smaller)):
        model = Model(config)
        roots, scale = Roots(model, 36 // trees, trees, 12, seed=7), max(map(abs, config.payoffs()))
        found.append(hop.root_policy(args, scale, grow(args, model, roots), roots.gumbel, trees))
    (log_probs, played, visits, q), (other_log_probs, other_played, other_visits, other_q) = found
    torch.testing.assert_close(log_probs.exp(), other_log_probs.exp(), atol=1e-6, rtol=0)
    torch.testing.assert_close(played, other_played, atol=1e-6, rtol=0)
    torch.testing.assert_close(q, 100 * other_q)
    assert torch.equal(visits, other_visits) and log_probs.exp().amax(1).median() > 0.9, "beta is no weak one"


HALVING = [  # considered actions, simulations, visits of the action that is due
    (4, 8, [0, 0, 0, 0, 1, 1, 2, 2]),
    (7, 16, [*[0] * 7, 1, 1, 1, 2, 2, 3, 3, 4, 4]),
    (5, 32, [*[0] * 5, *[1] * 5, *[2, 2, 3, 3, 4, 4, 5, 5, 6, 6], *[7, 7, 8, 8, 9, 9, 10, 10, 11, 11], 12, 12]),
    (1, 4, [0, 1, 2, 3]),
]


def test_sequential_halving_by_hand_and_of_all_sizes():
    for considered, simulations, due in HALVING:
        assert hop.sequential_halving(NUM_ACTIONS, simulations, CPU)[considered].tolist() == due
    for simulations in (*range(1, 40), 64, 100):
        table = hop.sequential_halving(NUM_ACTIONS, simulations, CPU)
        assert table.dtype == torch.float32 and len(table) == NUM_ACTIONS + 1
        for considered in range(1, NUM_ACTIONS + 1):
            assert table[considered].tolist() == reference.schedule(considered, simulations)


def test_pick_takes_the_action_whose_stretch_holds_the_number():
    probs = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0, 0.0])
    uniform = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, 0.9999])
    assert hop.pick(probs.expand(6, 7), uniform).tolist() == [1, 1, 3, 3, 4, 4]
    assert hop.pick(2 * probs.expand(6, 7), uniform).tolist() == [1, 1, 3, 3, 4, 4], (
        "probabilities need not add up to 1"
    )


# ---------------------------------------------------------------------------------------------------------------------
# The models that a search plays with

RULES = {**PRETRAINING_CASES, "4x4": BOARDS["4x4"]}
RULES["short"] = StagHuntConfig(height=2, width=4, num_players=4, num_hares=2, final_time=9, steps_after_first_hunt=2)


@pytest.mark.parametrize("config", RULES.values(), ids=RULES)
def test_env_transition_is_the_game(config):
    games, generator, n = 30, seeded(4), config.num_players
    env, seen, args, rows = StagHuntEnv(config, games, seed=6), set(), make_args(), torch.arange(games)
    for _ in range(2):
        state = random_states(env, generator)
        actions = mixed_actions(env, state, random_kinds(env, generator), 0.3, generator)
        after, reward, _, done = env.transition(state, actions)
        seats = [torch.full((games,), seat) for seat in range(n)] + [torch.randint(n, (games,), generator=generator)]
        for seat in seats:
            position = hop.Position(env.observe(state)[rows, seat], state.time, state.first_hunt, None, None)
            joint = actions.gather(1, (seat[:, None] + torch.arange(n)) % n)
            board, paid = hop.env_transition(args, env, position, state.prey_position.long(), joint, seat)
            assert_same("board", board, env.observe(after)[rows, seat])
            assert_same("reward", paid, reward[rows, seat])
            going = ~env.game_over(state) & (state.present[rows, seat] | config.prosocial)
            ended, hunt = hop.imagined_end(config, position.board, board, state.time + 1, state.first_hunt)
            gone = torch.zeros_like(done) if config.prosocial else ~after.present[rows, seat]
            assert torch.equal(ended[going], (done | gone)[going])
            assert torch.equal(hunt[going], after.first_hunt[going])
        seen |= {("left", bool((~state.present).any())), ("caught", bool((state.prey_alive & ~after.prey_alive).any()))}
    assert {("left", True), ("caught", True)} <= seen


def make_state(**changes):
    args = make_args(**changes)
    seeds = list(range(args.seed, args.seed + args.num_seeds))
    tables = [seats_table(args.seats, args.config.num_players)] * args.num_seeds
    state = hop.make_train_state(args, tables, seeds, CPU)
    with torch.no_grad():  # networks that say more than those that have learned nothing
        for stacked in state.networks:
            for p in stacked.parameters() if stacked is not None else ():
                noise = torch.randn(p.shape, generator=seeded(p.numel()))
                p.add_((0.3 if p.dim() == 2 or p.shape[1] in (1, 7) else 0.05) * noise)
    return state


def play(state, num_steps, **options):
    """-> Transitions, outputs, episodes, and what plan_actions was given and found in each step"""
    plan_actions, searches = hop.plan_actions, []

    def keep(*inputs):
        rng = torch.get_rng_state()
        searches.append((inputs, plan_actions(*inputs), rng))
        return searches[-1][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hop, "plan_actions", keep)
        found = hop.rollout(
            state.args, state.env, state.seats, state.networks, state.rollout_state, num_steps, **options
        )
    return *found, searches


class TrueWorld:
    """The rules in the place of the world model"""

    def __init__(self, env, prey_position, seat):
        self.env, self.prey_position, self.seat = env, prey_position, seat

    def __call__(self, board, joint, seat, method):
        assert method == "predict" and torch.equal(seat, self.seat)
        clock = torch.zeros(board.shape[:2].numel(), dtype=torch.int32)
        position = hop.Position(board.flatten(0, 1), clock, clock - 1, None, None)
        prey, seat = (x.flatten(0, 1) for x in (self.prey_position, self.seat))
        after, reward = hop.env_transition(make_args(), self.env, position, prey.long(), joint.flatten(0, 1), seat)
        return after.view_as(board), reward.view(board.shape[:2])


@pytest.mark.parametrize("share", [True, False])
def test_a_perfect_world_model_searches_as_the_rules_do(share):
    state = make_state(search_model="env", num_envs=6, share_parameters=share, num_seeds=2)
    *_, searches = play(state, 4)
    for (args, env, networks, position, prey, oracle, belief, seat, _), (log_probs, played, _, tree), rng in searches:
        for_trees = (x.repeat_interleave(args.num_trees, 1) for x in (prey, seat))
        networks = networks._replace(world=TrueWorld(env, *for_trees))
        torch.set_rng_state(rng)
        args = dataclasses.replace(args, search_model="world-model")
        found = hop.plan_actions(args, env, networks, position, prey, oracle, belief, seat, silent)
        assert torch.equal(found[3].edges[:, :-1, [0, 1, 3]], tree.edges[:, :-1, [0, 1, 3]])
        assert torch.equal(found[0], log_probs) and torch.equal(found[1], played)


SEARCHED = {
    "world model": {},
    "env": {"search_model": "env", "num_trees": 3},
    "in the tree": {"infer_in_tree": True},
    "actions": {"subgoals": "actions"},
    "actions in the tree": {"subgoals": "actions", "infer_in_tree": True, "goal_kind": "discrete"},
    "posterior": {"subgoals": "posterior", "seats": "learner,mixed,learner"},
    "no subgoals": {"subgoals": "none", "search_model": "env"},
    "hop": {"method": "hop", "num_trees": 3},
    "hop in the tree": {"method": "hop", "infer_in_tree": True},
    "hop, ours": {"method": "hop-ours", "infer_in_tree": True},
}


@pytest.mark.parametrize("changes", SEARCHED.values(), ids=SEARCHED)
def test_every_node_holds_what_rules_and_networks_say(changes):
    """Along every edge: the next board and reward, the end, the history, legal actions, policy and value"""
    state = make_state(num_envs=4, **changes)
    *_, searches = play(state, 3)
    checked = ended = 0
    for (args, env, networks, _, prey, oracle, belief, seat, _), (*_, tree), _ in searches[1:]:
        m, n = len(seat), args.num_trees * seat.shape[1]
        prey, seat, oracle, goals = (x.repeat_interleave(args.num_trees, 1) for x in (prey, seat, oracle, belief.goals))
        assert torch.equal(tree.stats[:, 0, 2] > 0, ~(tree.position.board[:, 0, 0].flatten(1).amax(1) > 0))
        views_of = functools.partial(hop.entity_views, args, env, prey_position=prey)
        for node in range(tree.edges.shape[1] - 1):
            row, action = (tree.edges[:, :-1, 3] == node).flatten(1).max(1) if node else (None, None)
            here = hop.Position(*(x[:, node].unflatten(0, (m, -1)) for x in tree.position))
            clock, read, views = here.time / env.config.final_time, goals, views_of(here.board)
            opponent_probs = tree.opponent_probs[:, node].unflatten(0, (m, -1))
            if args.infer_in_tree:
                read = hop.infer_opponents(args, env, networks, views, clock, here.history, oracle).goals
            elif args.subgoals == "actions":  # of co-players that pursue what they did at the root
                mean = belief.params.chunk(2, 2)[0].unflatten(1, (-1, 2)).repeat_interleave(args.num_trees, 1)
                seen = [[x[:, :, 1 + k] for x in views] for k in (0, 1)]
                said = [networks.moa(*seen[k][:2], clock, mean[:, :, k], seen[k][2]).exp() for k in (0, 1)]
                read = torch.cat(said, 2).detach()
            _, legal, log_probs, value = hop.evaluate_policy(args, networks.policy, views, clock, here.last_joint, read)
            known = torch.ones(m, n, dtype=torch.bool) if node == 0 else row.view(m, n)
            assert torch.equal(legal, views[2][:, :, 0]) and not (log_probs.exp() * ~legal).any()
            assert not (opponent_probs * ~views[2][:, :, 1:])[known].any(), "co-players do what they may"
            if args.subgoals == "actions":
                torch.testing.assert_close(opponent_probs.flatten(2)[known], read[known])
            torch.testing.assert_close(tree.edges[:, node, 2].view(m, n, -1)[known], log_probs[known])
            over = tree.stats[:, node, 2].view(m, n) > 0
            alive = known & ~over
            torch.testing.assert_close(tree.stats[:, node, 0].view(m, n)[alive], value[alive])
            if node == 0:
                continue
            assert (tree.stats[:, node, 0].view(m, n)[known & over] == 0).all(), "nothing is earned after an end"
            parent, action = action // NUM_ACTIONS, action % NUM_ACTIONS
            rows = torch.arange(len(parent))
            before = hop.Position(*(x[rows, parent] for x in tree.position))
            joint = tree.position.last_joint[:, node]
            assert torch.equal(joint[:, 0][row], action[row])
            assert (tree.opponent_probs[rows, parent].gather(2, joint[:, 1:, None])[row] > 0).all()
            by_learner = (before.board.unflatten(0, (m, -1)), joint.unflatten(0, (m, -1)), seat)
            if args.search_model == "env":
                board, reward = hop.env_transition(args, env, before, prey.long().flatten(0, 1), joint, seat.flatten())
            else:
                board, reward = hop.predict_step(args, env.config, networks.world, *by_learner)
                board, reward = board.flatten(0, 1), reward.flatten()
            end, hunt = hop.imagined_end(env.config, before.board, board, before.time + 1, before.first_hunt)
            assert torch.equal(tree.position.time[:, node][row], before.time[row] + 1)
            assert torch.equal(tree.position.first_hunt[:, node][row], hunt[row])
            assert torch.equal(tree.position.board[:, node][row], board[row])
            assert torch.equal(tree.stats[:, node, 1][row], reward[row])
            assert torch.equal(tree.stats[:, node, 2][row] > 0, end[row])
            if args.infer_in_tree:
                past, clock = before.history.unflatten(0, (m, -1)), before.time.view(m, n) / env.config.final_time
                then = hop.infer_opponents(args, env, networks, views_of(by_learner[0]), clock, past, oracle)
                past = hop.update_history(args, env, networks, then, by_learner[1], past, torch.zeros_like(known))
                torch.testing.assert_close(here.history[known], past[known])
            checked, ended = checked + int(row.sum()), ended + int(end[row].sum())
    assert checked > 100 and ended > 5, "trees grew, and into the end of games"


def test_a_bonus_counts_in_the_tree(monkeypatch):
    """Real steps, imagined ones and those of a search go through shape_reward"""
    monkeypatch.setattr(
        hop, "shape_reward", lambda args, config, reward, board, joint: reward + (joint[..., 0] == 4) * 9.0
    )
    *_, searches = play(make_state(search_model="env"), 2)
    for _, (*_, tree), _ in searches:
        reached = (tree.edges[:, :-1, 3] > 0).flatten(1).any(1)
        stayed = (tree.position.last_joint[:, 1:-1, 0] == 4) & (tree.stats[:, 1:-1, 1] != 0)
        assert reached.any() and stayed.any() and (tree.stats[:, 1:-1, 1][stayed] >= 9).all()


@pytest.mark.parametrize("share", [True, False])
def test_a_payoff_in_the_tree_is_that_of_the_learners_seat(share):
    """All stand at a stag, and who differs in strength gets another share of it"""
    strengths, trees, games = (1.0, 2.0, 4.0), 3, 8
    config = dataclasses.replace(CONFIG, strengths=strengths)
    flags = {"search_model": "env", "planner": "one-step", "num_trees": trees, "num_envs": games}
    state = make_state(**flags, share_parameters=share, config=config)
    for p in state.networks.moa.parameters():
        p.data.zero_()  # co-players do anything that is legal
    position, stag = state.env.state.position, state.env.state.prey_position[:, :1]
    position.copy_(stag.expand_as(position))
    *_, searches = play(state, 1)
    tree, pairs = searches[0][1][3], set()
    for row in range(3 * games * trees):
        seat = row // (games * trees)
        node = int(tree.edges[row, 0, 3, HUNT_STAG])
        joint = tree.position.last_joint[row, node].tolist()
        party = [strengths[(seat + k) % 3] for k in range(3) if joint[k] == HUNT_STAG]
        expected = 10 * strengths[seat] / sum(party) if len(party) > 1 else 0.0
        assert tree.stats[row, node, 1].item() == pytest.approx(expected, abs=1e-5)
        pairs |= {tuple(party)} if len(party) == 2 else set()
    assert len(pairs) == 6, "each seat with each other one"


SCALES = {  # the game, and its highest payoff without sign
    "default": (CONFIG, 5.0),
    "all payoffs negative": (dataclasses.replace(CONFIG, stag_reward=2.0, hare_reward=0.5, time_reward=-4.0), 4.0),
    "no payoffs": (dataclasses.replace(CONFIG, stag_reward=0.0, hare_reward=0.0), 1.0),
}


def path_length(tree, row, node=0):
    """Edges walked from this node on, by all simulations together"""
    visits, _, _, child = tree.edges[row, node].tolist()
    return sum(visits) + sum(path_length(tree, row, int(to)) for to in child if to)


@pytest.mark.parametrize(("config", "scale"), SCALES.values(), ids=SCALES)
def test_each_tree_has_subgoals_of_its_own_and_their_q_are_averaged(config, scale):
    *_, searches = play(make_state(num_trees=3, search_model="env", config=config), 2)
    for (args, _, _, _, _, _, _, seat, _), (log_probs, _, stats, tree), _ in searches:
        opponents = tree.opponent_probs[:, 0].unflatten(0, (-1, 3))
        assert (opponents[:, 0] != opponents[:, 1]).any() and (opponents[:, 0] != opponents[:, 2]).any()
        edges, value = tree.edges[:, 0], tree.stats[:, 0, :1]
        q = hop.completed_q(edges[:, 0], edges[:, 1], edges[:, 2], value).unflatten(0, (-1, 3)).mean(1)
        own, legal = edges[::3, 2], edges[::3, 2] > hop.ILLEGAL / 2
        expected = (args.q_temperature * q / scale + own).masked_fill(~legal, -1e9).log_softmax(1)
        searched = tree.stats[::3, 0, 2] == 0
        improved = log_probs.view(seat.numel(), -1)
        torch.testing.assert_close(improved[searched], expected[searched])
        gain, kl, depth = stats.view(-1, 3).T
        surplus = improved.exp() - own.exp()
        torch.testing.assert_close(gain, (surplus * q).sum(1))
        ratio = torch.where(legal, improved - own, 0.0).clamp(-50, 50)
        torch.testing.assert_close(kl, (improved.exp() * ratio).sum(1))
        lengths = [path_length(tree, row) / args.num_simulations for row in range(len(tree.edges))]
        torch.testing.assert_close(depth, torch.tensor(lengths).view(-1, 3).mean(1))


CO_PLAYERS = {  # how co-players' subgoals come about
    "continuous": {},
    "discrete": {"goal_kind": "discrete", "goal_dim": 3},
    "in the tree": {"infer_in_tree": True},
    "posterior": {"subgoals": "posterior", "seats": "learner,mixed,learner"},
    "hop": {"method": "hop"},
}
NUM_TREES = 800


@functools.cache
def many_trees(name):
    """A decision of the middle of a game, with many trees of two simulations -> what plan_actions was given, Tree"""
    state = make_state(num_envs=3, **{"search_model": "env", **CO_PLAYERS[name]})
    with torch.no_grad():
        for p in (*state.networks.inference.parameters(), *state.networks.moa.parameters()):
            p.mul_(2)  # else the subgoals of different co-players lead to much the same
    *_, searches = play(state, 3)
    args, *given, _ = searches[-1][0]
    args = dataclasses.replace(args, num_trees=NUM_TREES, num_simulations=2)
    torch.manual_seed(1)
    return (args, *given), hop.plan_actions(args, *given, silent)[3]


@pytest.mark.parametrize("name", CO_PLAYERS)
def test_each_co_player_pursues_its_own_subgoal(name):
    """What the search expects of a co-player at the root: MOA, averaged over the subgoals inferred of that co-player"""
    (args, env, networks, position, prey, oracle_id, belief, _), tree = many_trees(name)
    m, games, k = belief.present.shape
    ours = tree.opponent_probs[:, 0].unflatten(0, (m, games, NUM_TREES)).mean(2)
    views = hop.entity_views(args, env, position.board, prey)
    params = belief.params.unflatten(1, (games, k))
    expected = torch.zeros(k, *ours.shape)  # [whose subgoal, M, E, K, A]
    torch.manual_seed(2)
    for whose, j in itertools.product(range(k), range(k)):
        noise = hop.goal_noise(args, m, games, NUM_TREES, device=CPU)
        goals = hop.sample_goal(args.goal_kind, params[:, :, whose, None], noise)
        if args.subgoals == "posterior":
            goals = oracle_id[:, :, whose, None]
        draws = goals.shape[2]
        entities, walls, legal = (x[:, :, 1 + j].repeat_interleave(draws, 1) for x in views)
        clock = (position.time / env.config.final_time).repeat_interleave(draws, 1)
        said = networks.moa(entities, walls, clock, goals.flatten(1, 2), legal).detach().exp()
        expected[whose, :, :, j] = said.unflatten(1, (games, draws)).mean(2)
    own = torch.stack([expected[j, :, :, j] for j in range(k)], 2)
    other = torch.stack([expected[1 - j, :, :, j] for j in range(k)], 2)
    assert (own - other).abs().amax() > 0.3, "another's subgoal would be noticed"
    torch.testing.assert_close(ours, own, atol=0.1, rtol=0)


def test_co_players_draw_their_actions_independently():
    """Of each other, in each simulation, tree and decision"""
    (_, _, _, _, _, _, belief, _), tree = many_trees("discrete")
    places = []
    for node in (1, 2):
        parent = (tree.edges[:, :, 3] == node).any(2).int().argmax(1)
        probs = tree.opponent_probs[torch.arange(len(parent)), parent]  # [T, K, A]
        action = tree.position.last_joint[:, node, 1:, None]
        below = probs.cumsum(2).gather(2, action) - probs.gather(2, action) / 2  # in the middle of its stretch
        places.append((below[..., 0] - 0.5).unflatten(0, (*belief.present.shape[:2], NUM_TREES)))
    first, second = places  # [M, E, trees, K], each with mean 0, whatever was drawn elsewhere
    searched = (tree.stats[:, 0, 2] == 0).unflatten(0, first.shape[:3])[..., None] & belief.present[:, :, None]
    pairs = {
        "co-players": (first[..., 0], first[..., 1], searched.all(3)),
        "simulations": (first, second, searched),
        "trees": (first, first.roll(1, 2), searched),
        "games": (first, first.roll(1, 1), searched & searched.roll(1, 1)),
        "learners": (first, first.roll(1, 0), searched & searched.roll(1, 0)),
    }
    assert first[searched].std() > 0.15
    for name, (one, other, counts) in pairs.items():
        one, other = one[counts], other[counts]
        correlation = (one * other).mean() / (one.square().mean() * other.square().mean()).sqrt()
        assert counts.sum() > 1000 and correlation.abs() < 0.1, (name, correlation)


def test_gumbel_noise_belongs_to_the_decision():
    """All its trees have the same, drawn so that the first action follows the policy; each decision has its own"""
    state = make_state(num_envs=500, root="gumbel", num_trees=2, num_simulations=1, search_model="env")
    *_, searches = play(state, 1)
    tree = searches[0][1][3]
    first = tree.position.last_joint[:, 1, 0].view(-1, 2)
    assert torch.equal(first[:, 0], first[:, 1])
    probs, order = tree.edges[::2, 0, 2].exp().sort(dim=1, descending=True)
    rank = (order == first[:, :1]).int().argmax(1)
    expected = probs.sum(0)
    counts = torch.bincount(rank, minlength=NUM_ACTIONS)
    rare = expected < 20
    expected = torch.cat([expected[~rare], expected[rare].sum(0, keepdim=True)])
    counts = torch.cat([counts[~rare], counts[rare].sum(0, keepdim=True)])
    assert chi_square_p(counts, expected) > 1e-3 and expected.max() < 0.6 * len(rank)


# ---------------------------------------------------------------------------------------------------------------------
# HOP's belief: stag or hare, by Bayes' rule


def likelihoods(state, board, prey_position, time):
    """[M, n, K, 2, 7] MOA's log-probabilities of each co-player's actions, goal by goal; present [M, n, K]"""
    k = state.env.config.num_players - 1
    views = hop.entity_views(state.args, state.env, board, prey_position)
    entities, walls, legal = (x[:, :, 1:].flatten(1, 2) for x in views)
    clock = (time / state.env.config.final_time).repeat_interleave(k, 1)
    goals = [torch.eye(2)[goal].expand(*clock.shape, 2) for goal in range(2)]
    said = [state.networks.moa(entities, walls, clock, goal, legal) for goal in goals]
    present = board[:, :, 1 : k + 1].flatten(3).amax(3) > 0
    return torch.stack(said, 2).detach().unflatten(1, (-1, k)), present


def bayes(evidence, prior):
    """Prior times likelihood, by hand"""
    weights = [often * math.exp(score - max(evidence)) for score, often in zip(evidence, prior, strict=True)]
    return [weight / sum(weights) for weight in weights]


@pytest.mark.parametrize("method", ["hop", "hop-ours"])
@pytest.mark.parametrize("remembers", [True, False])
def test_belief_in_stag_or_hare_by_hand(remembers, method, monkeypatch):
    """HOP's prior is b0 = alpha b0 + (1 - alpha) 1[goal], by what the co-player was seen to take, from 1/2 on; ours 1
    and discounted counts, by what it seems to have pursued"""
    flags = {"inter_episode_belief": remembers, "memory_discount": 0.7, "history_reset_prob": 0.0, "planner": "none"}
    flags["seats"] = "learner,learner,nearest_stag"
    state, start, beliefs = make_state(method=method, num_envs=5, **flags), 0.5 if method == "hop" else 1.0, []
    state.networks.moa.params["encoder.table"].data.mul_(30)  # so that some action is as good as impossible
    infer_opponents = hop.infer_opponents
    monkeypatch.setattr(
        hop, "infer_opponents", lambda *given: (beliefs.append(infer_opponents(*given)), beliefs[-1])[1]
    )
    evidence, prior = np.zeros((2, 5, 2, 2)), np.full((2, 5, 2, 2), start)
    seen = {"left": 0, "clamped": 0, "ends": 0, "stag": 0, "hare": 0, "nothing": 0}
    for _ in range(40):
        kept = torch.tensor(np.concatenate([evidence, prior - start], 3)).float()
        torch.testing.assert_close(state.rollout_state["history"], kept, atol=1e-3, rtol=1e-4)
        beliefs.clear()
        steps, outputs, *_ = play(state, 1)
        believed = beliefs[0].params.exp().view(2, 5, 4)  # before the step
        rough = hop.bayes_posterior(state.args, steps.history[:, 0].float()).exp()  # what metrics are made of
        torch.testing.assert_close(rough.flatten(2), believed, atol=0.02, rtol=0)
        read = outputs["goals"][:, 0]  # by the policy
        assert read.shape[2] == 0 if method == "hop" else torch.allclose(read, believed)
        acts, present = likelihoods(state, steps.board[:, 0], steps.prey_position[:, 0], steps.time[:, 0])
        for m, e, k in np.ndindex(2, 5, 2):
            belief = bayes(evidence[m, e, k], prior[m, e, k])
            assert believed[m, e, 2 * k : 2 * k + 2].tolist() == pytest.approx(belief, abs=1e-4)
            scores = acts[m, e, k, :, int(steps.joint[m, 0, e, 1 + k])].tolist()
            if present[m, e, k]:
                clamped = [max(-10.0, score) for score in scores]
                evidence[m, e, k] += np.array(clamped) - max(clamped)
                seen["clamped"] += min(scores) < -10
            else:
                seen["left"] += 1
            if steps.exited[m, 0, e, 1 + k]:
                prey = {HUNT_STAG: 0, HUNT_HARE: 1}[int(steps.joint[m, 0, e, 1 + k])]
                seen[("stag", "hare")[prey]] += 1
                if method == "hop":
                    prior[m, e, k] = 0.7 * prior[m, e, k] + 0.3 * np.eye(2)[prey]
            if steps.done[m, 0, e]:
                if method == "hop-ours":
                    prior[m, e, k] = 1 + 0.7 * (prior[m, e, k] - 1 + bayes(evidence[m, e, k], prior[m, e, k]))
                prior[m, e, k] = prior[m, e, k] if remembers else start
                evidence[m, e, k] = 0
                seen["nothing"] += int(present[m, e, k] and not steps.exited[m, 0, e, 1 + k])
                seen["ends"] += 1
    assert all(count > 2 for count in seen.values()), seen


def test_hop_learns_from_the_prey_that_was_taken():
    state = make_state(method="hop", num_envs=24, planner="none", seats="learner,mixed,nearest_stag")
    steps, *_ = play(state, 9)
    with torch.no_grad():
        ours = hop.opponent_model_losses(state.args, state.env, state.networks, steps, 0.5)
    total = games = 0.0
    kinds = {"stag": 0, "hare": 0, "unknown": 0, "left": 0}
    columns = (steps.board, steps.prey_position, steps.time)
    acts, present = zip(*(likelihoods(state, *(x[:, t] for x in columns)) for t in range(9)), strict=True)
    for e, k in np.ndindex(24, 2):
        first = 0
        for t in range(9):
            if not steps.done[0, t, e] and t < 8:
                continue
            game, first = range(first, t + 1), t + 1
            prey = [int(steps.joint[0, u, e, 1 + k]) for u in game if steps.exited[0, u, e, 1 + k]]
            if not prey:
                kinds["unknown"] += 1
                continue
            goal = {HUNT_STAG: 0, HUNT_HARE: 1}[prey[0]]
            kinds["stag" if goal == 0 else "hare"] += 1
            counted = [u for u in game if present[u][0, e, k]]
            kinds["left"] += len(game) - len(counted)
            losses = [-float(acts[u][0, e, k, goal, int(steps.joint[0, u, e, 1 + k])]) for u in counted]
            total, games = total + sum(losses) / len(losses), games + 1  # each game weighs the same
    assert all(count > 2 for count in kinds.values()), kinds
    assert ours["moa"].item() == pytest.approx(total / games, rel=1e-4) and torch.equal(ours["moa"], ours["loss"])


def test_hop_reads_the_state_alone():
    """Neither policy nor value change with what was believed or done before; ours do"""
    for method, changes in (("hop", False), ("hop-ours", True)):
        state = make_state(method=method, planner="none", num_envs=3)
        steps, outputs, *_ = play(state, 4)
        views = hop.entity_views(state.args, state.env, steps.board[:, 3], steps.prey_position[:, 3])
        given = state.args, state.networks.policy, views, steps.time[:, 3] / CONFIG.final_time
        said = [
            hop.evaluate_policy(*given, last_joint, goals)[2:]
            for last_joint, goals in (
                (steps.last_joint[:, 3], outputs["goals"][:, 3]),
                (6 - steps.last_joint[:, 3], 1 - outputs["goals"][:, 3]),
            )
        ]
        assert all(torch.equal(*pair) != changes for pair in zip(*said, strict=True))


def test_hop_values_are_learned_from_monte_carlo_returns():
    config = dataclasses.replace(CONFIG, time_reward=-0.1)
    state = make_state(method="hop", num_envs=12, planner="none", config=config)
    steps, outputs, *_ = play(state, 14)
    batch = hop.make_ppo_batch(state.args, hop.real_samples(state.args, config, steps, outputs), real=True)
    returns, compared = batch["returns"].view(3, 14, 12), 0
    for m, e in np.ndindex(3, 12):
        expected = None  # from the end of the rollout on, as long as the game does not end
        for t in reversed(range(14)):
            if steps.done[m, t, e] or steps.exited[m, t, e, 0]:
                expected = 0.0
            if expected is not None and steps.board[m, t, e, 0].any():
                expected = float(steps.reward[m, t, e]) + state.args.gamma * expected
                assert returns[m, t, e].item() == pytest.approx(expected, abs=1e-4)
                compared += 1
    assert compared > 200


# ---------------------------------------------------------------------------------------------------------------------
# The loop


PLAYED = [{}, {"root": "gumbel", "num_trees": 1}, {"method": "hop", "seats": "learner,random,learner"}]


@pytest.mark.parametrize("changes", PLAYED)
def test_learners_play_what_they_searched(changes):
    state = make_state(num_envs=8, **changes)
    steps, outputs, _, searches = play(state, 8)
    moved = 0.0
    assert len(searches) == 8
    for t, (_, (log_probs, played, stats, _), _) in enumerate(searches):
        assert torch.equal(outputs["log_probs"][:, t], log_probs) and torch.equal(outputs["search"][:, t], stats)
        assert (played.gather(2, steps.joint[:, t, :, :1].long()) > 0).all()
        own, value = state.networks.policy(outputs["inputs"][:, t], outputs["legal"][:, t])
        torch.testing.assert_close(outputs["value"][:, t], value)
        moved += (own.exp() - log_probs.exp()).abs().sum(2).max().item()
        assert (log_probs.exp()[~outputs["legal"][:, t]] == 0).all(), "only legal actions are played"
    assert moved > 1
    batch = hop.make_ppo_batch(state.args, hop.real_samples(state.args, CONFIG, steps, outputs), real=True)
    torch.testing.assert_close(
        batch["log_prob"], outputs["log_probs"].gather(3, steps.joint[..., :1].long()).flatten(1)
    )
    assert torch.equal(batch["distilled"], hop.learner_mask(CONFIG, steps.board).float().flatten(1))


def learned(state, batch, **changes):
    """Copies of the policy's weights after ppo_update, and the metrics"""
    args = dataclasses.replace(state.args, **changes)
    policy, kept = state.networks.policy, {k: p.clone() for k, p in state.networks.policy.state_dict().items()}
    torch.manual_seed(9)
    metrics = hop.ppo_update(args, policy, hop.make_optimizer(policy.parameters(), args.learning_rate), batch)
    after = {name: p.clone() for name, p in policy.state_dict().items()}
    policy.load_state_dict(kept)
    return after, metrics


def real_batch(state, num_steps=8):
    steps, outputs, *_ = play(state, num_steps)
    return hop.make_ppo_batch(state.args, hop.real_samples(state.args, CONFIG, steps, outputs), real=True)


def cross_entropy(state, batch):
    with torch.no_grad():
        log_probs, _ = state.networks.policy(batch["inputs"], batch["legal"])
    loss = -(batch["log_probs"].exp() * log_probs.clamp(min=-50)).sum(2)
    return (loss * batch["weight"]).sum(1) / batch["weight"].sum(1)


@pytest.mark.parametrize("script", [hop, ppo])
@pytest.mark.parametrize("clip_vloss", [True, False])
def test_the_clipped_value_loss_is_cleanrls(clip_vloss, script):
    generator = seeded(2)
    newvalue, returns, value = torch.randn(3, 2, 50, generator=generator)
    zeros, ones = torch.zeros(2, 50), torch.ones(2, 50)
    mb = {"inputs": zeros, "legal": zeros, "action": zeros.long(), "log_prob": zeros, "log_probs": zeros[..., None]}
    mb |= {"advantage": zeros, "returns": returns, "value": value, "weight": ones, "real": ones, "distilled": zeros}
    mb["critic_weight"] = (torch.rand(2, 50, generator=generator) < 0.7).float()
    args = dataclasses.replace(script.make_args("ppo", "cpu"), clip_vloss=clip_vloss, clip_coef=0.3)
    loss, metrics = script.ppo_loss(args, lambda inputs, legal: (torch.zeros(2, 50, 7), newvalue), mb)
    for m in range(2):
        counts = mb["critic_weight"][m] > 0
        new, target, old = newvalue[m][counts], returns[m][counts], value[m][counts]
        v_loss_unclipped = (new - target) ** 2
        v_clipped = old + torch.clamp(new - old, -0.3, 0.3)
        v_loss_max = torch.max(v_loss_unclipped, (v_clipped - target) ** 2)
        expected = 0.5 * (v_loss_max if clip_vloss else v_loss_unclipped).mean()
        torch.testing.assert_close(metrics["value_loss"][m], expected)
        torch.testing.assert_close(loss[m], args.vf_coef * expected)
        assert (v_loss_max > v_loss_unclipped).any() and (v_loss_max == v_loss_unclipped).any()


ONCE = {"update_epochs": 1, "num_minibatches": 1, "learning_rate": 1e-12}


def test_the_policy_learns_what_the_search_found():
    state = make_state(num_envs=16)
    batch = real_batch(state)
    before = cross_entropy(state, batch)
    _, metrics = learned(state, batch, **ONCE)
    for name in ("policy_loss", "distill"):
        torch.testing.assert_close(metrics[f"losses/{name}"], before)
    after, _ = learned(state, batch, update_epochs=30, ent_coef=0.0, learning_rate=3e-3)
    state.networks.policy.load_state_dict(after)
    probs = batch["log_probs"].exp()
    entropy = -(probs * probs.clamp(min=1e-30).log()).sum(2) * batch["weight"]
    assert ((cross_entropy(state, batch) - before) < -0.3 * (before - entropy.sum(1) / batch["weight"].sum(1))).all()
    # What PPO would read changes nothing, even where the action was one that the search hardly ever plays.
    nonsense = {"advantage": -batch["advantage"] + 100, "action": torch.zeros_like(batch["action"])}
    nonsense["log_prob"] = torch.full_like(batch["log_prob"], -200.0)
    other, metrics = learned(state, batch | nonsense)
    same, _ = learned(state, batch)
    assert all(torch.equal(other[name], same[name]) for name in same)
    assert all(value.isfinite().all() for value in metrics.values())


def test_ppo_compares_with_what_was_played_by():
    state = make_state(num_envs=8, policy_loss="ppo")
    batch = real_batch(state)
    assert (batch["distilled"] == 0).all()
    _, metrics = learned(state, batch, **ONCE)
    with torch.no_grad():
        own, _ = state.networks.policy(batch["inputs"], batch["legal"])
    weight = batch["weight"]

    def mean(x):
        return (x * weight).sum(1) / weight.sum(1)

    log_ratio = (own - batch["log_probs"]).gather(2, batch["action"].long()[..., None])[..., 0]
    ratio = log_ratio.exp()
    advantage = batch["advantage"] - mean(batch["advantage"])[:, None]
    advantage = advantage / (mean(advantage.square()).sqrt()[:, None] + 1e-8)
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    torch.testing.assert_close(metrics["losses/policy_loss"], -mean(gain), atol=1e-4, rtol=1e-4)
    assert (metrics["losses/approx_kl"] > 1e-3).all() and (metrics["losses/distill"] == 0).all()


def test_imagined_samples_are_never_distilled(monkeypatch):
    state, seen, ppo_update = make_state(imagination=True, ppo_real_ratio=0.2), [], hop.ppo_update
    state.horizon.fill_(4)
    monkeypatch.setattr(hop, "ppo_update", lambda *given: (seen.append(given[3]), ppo_update(*given))[1])
    hop.train_iteration(state, False, False)
    batch, real = seen[0], seen[0]["real"] > 0
    assert (batch["weight"][~real] > 0).any() and (batch["distilled"][~real] == 0).all()
    assert torch.equal(batch["distilled"][real], batch["weight"][real]) and batch["weight"][real].any()
    once = {"num_minibatches": 1, "update_epochs": 1}
    changed = batch | {"advantage": torch.where(real, batch["advantage"], -batch["advantage"])}
    ours, other = learned(state, batch, **once)[0], learned(state, changed, **once)[0]
    assert any((ours[name] != other[name]).any() for name in ours if "actor" in name), "PPO still learns from them"
    changed = batch | {"advantage": torch.where(real, 100.0, batch["advantage"])}
    other = learned(state, changed, **once)[0]
    assert all(torch.equal(ours[name], other[name]) for name in ours), "without a look at what is distilled"


def test_search_metrics_count_only_learners_on_the_board(monkeypatch):
    state, rollout, seen = make_state(num_envs=32), hop.rollout, []
    monkeypatch.setattr(hop, "rollout", lambda *given, **rest: seen.append(rollout(*given, **rest)) or seen[-1])
    hop.train_iteration(state, False, False)
    (steps, outputs, _), metrics = seen[0], state.metrics.read()
    present = steps.board[:, :, :, 0].flatten(3).amax(3) > 0
    assert not present.all()
    for i, name in enumerate(("gain", "kl", "depth")):
        expected = [float(outputs["search"][m, ..., i][present[m]].mean()) for m in range(3)]
        assert metrics[f"search/{name}"].tolist() == pytest.approx(expected, rel=1e-4) and min(expected) > 0


# ---------------------------------------------------------------------------------------------------------------------
# From end to end


def run(run_dir, script=hop, **changes):
    return script.main(make_args(script, run_dir=str(run_dir), **changes))


@pytest.mark.parametrize("method", ["ppo", "ppo-omg", "hopplus"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_without_search_it_has_the_other_scripts_defaults(method, device):
    ours, theirs = (vars(script.make_args(method, device)) for script in (hop, ppo))
    assert ours["planner"] == "none" and {k: ours[k] for k in theirs if k != "exp_name"} == {
        k: v for k, v in theirs.items() if k != "exp_name"
    }


def test_defaults_of_the_methods_that_search():
    for method in ("hopplus-mcts", "hop", "hop-ours"):
        args = hop.make_args(method, "cpu")
        assert (args.num_envs, args.total_timesteps, args.imagination_horizon, args.subgoal_period) == (
            64,
            80_000,
            8,
            1,
        )
        assert args.planner == "mcts" and not args.imagination and hop.validate(args)
    assert (args.num_trees, args.search_model, args.search_prior, args.subgoals, args.goal_dim) == (
        5,
        "env",
        0,
        "bayes",
        2,
    )
    published = {"subgoals": "hop", "pretraining_updates": 0, "offline_ratio": 0.0, "gae_lambda": 1.0, "ent_coef": 0.0}
    published |= {"history_reset_prob": 0.0, "method": "hop"}
    assert dataclasses.asdict(hop.make_args("hop", "cpu")) == dataclasses.asdict(args) | published
    assert {name: getattr(hop.make_args("hop-ours", "cpu"), name) for name in published} == {
        **{"subgoals": "bayes", "pretraining_updates": 200, "offline_ratio": 0.5, "gae_lambda": 0.95, "ent_coef": 0.03},
        **{"history_reset_prob": 0.1, "method": "hop-ours"},
    }
    assert hop.parse_args(["--device", "cpu"]).method == "hopplus-mcts" and hop.make_args().exp_name == "hopplus_mcts"


SHORT = {"num_steps": 4, "total_timesteps": 32, "pretraining_updates": 2, "num_simulations": 4}  # two iterations


def test_without_search_it_is_the_other_script(tmp_path):
    flags = {**TINY, **SHORT, "method": "hopplus"}
    shared = {name: value for name, value in flags.items() if name not in ("num_simulations", "num_trees")}
    ours = hop.main(hop.make_args(**flags, run_dir=str(tmp_path / "ours")))
    theirs = ppo.main(ppo.make_args(**shared, run_dir=str(tmp_path / "theirs")))
    rows = [without_times(lines_of(Path(found["checkpoint"]).parent)) for found in (ours, theirs)]
    for row in rows[0]:
        assert row.pop("losses/distill") == 0
    assert rows[0] == rows[1] and len(rows[0]) == 2


VARIANTS = {
    "one-step, actions": {"planner": "one-step", "subgoals": "actions", "goal_kind": "discrete"},
    "gumbel, oracle": {"root": "gumbel", "num_trees": 1, "search_model": "env",
                       "subgoals": "oracle", "seats": "learner,mixed,random"},
    "in the tree, imagined": {"infer_in_tree": True, "imagination": True, "policy_loss": "ppo", "ppo_real_ratio": 0.5,
                              "imagined_goals": "prior"},
    "hop": {"method": "hop", "num_seeds": 2, "seats": "learner,learner,nearest_stag"},
    "hop, ours": {"method": "hop-ours", "seats": "learner,learner,nearest_stag"},
    "no subgoals, walls": {"subgoals": "none", "share_parameters": True,
                           "config": StagHuntConfig(4, 5, 3, num_hares=2, max_wall_pieces=2, final_time=6)},
}  # fmt: skip


@pytest.mark.parametrize("subgoals", ["none", "actions", "inferred", "posterior", "oracle", "bayes", "hop"])
def test_models_are_made_where_something_reads_them(subgoals):
    inferred = subgoals in ("actions", "inferred", "bayes", "hop")
    for planner, model, imagination in itertools.product(("mcts", "one-step", "none"), ("env", "world-model"), (0, 1)):
        args = make_args(subgoals=subgoals, planner=planner, search_model=model, imagination=bool(imagination))
        networks = hop.make_networks(args, CONFIG, [1], CPU)
        searches = planner != "none"
        for stacked in (networks.prior, networks.inference, networks.moa, networks.moa_prior):
            assert (stacked is not None) == (inferred or searches or bool(imagination))
        assert (networks.world is not None) == ((searches and model == "world-model") or bool(imagination))


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_variants_run_and_log_what_the_search_does(changes, tmp_path):
    found = run(tmp_path, **SHORT, **changes)
    rows = lines_of(Path(found["checkpoint"]).parent)
    phases = {"select", "expand", "infer_subgoals", "moa", "network", "backup", "rollout"}
    for row in rows:
        assert {f"time/{name}" for name in phases} <= row.keys() and {"search/gain", "search/kl"} <= row.keys()
        depth, one_step = row["search/depth"], changes.get("planner") == "one-step"
        assert depth == pytest.approx(1) if one_step else 1 <= depth <= 4
        assert row["search/kl"] >= 0 and (row["losses/distill"] == 0) == (changes.get("policy_loss") == "ppo")
    assert len(rows) == 2


def test_hop_sees_no_rule_based_games(tmp_path, monkeypatch):
    pretrain, called = hop.pretrain, []
    monkeypatch.setattr(hop, "pretrain", lambda *given: (called.append(given[0].method), pretrain(*given))[1])
    flags = SHORT | {"total_timesteps": 16, "learning_rate": 1e-12, "subgoal_learning_rate": 1e-12}
    for method in ("hop", "hop-ours"):
        given = {"method": method, "pretraining_updates": 0} | ({} if method == "hop" else {"offline_ratio": 0.5})
        found = run(tmp_path / method, **flags | given)
        state = torch.load(found["checkpoint"])["states"][0]
        moa = state["networks"]["moa"]["encoder.table"]
        assert ("offline_replay" in state) == (method == "hop-ours")
        alike = torch.allclose(moa[0], moa[1])
        assert alike == (method == "hop-ours"), "each learner has its own MOA from the start, or a copy of one"
    assert called == ["hop-ours"]


@pytest.mark.parametrize("changes", [{}, {"method": "hop"}], ids=["hopplus-mcts", "hop"])
def test_resumed_run_is_the_same_bit_for_bit(changes, tmp_path, monkeypatch):
    save_checkpoint = hop.save_checkpoint

    def keep_all(path, content):
        save_checkpoint(path, content)
        shutil.copy(path, path.with_name(f"checkpoint_{content['iteration']}.pt"))

    monkeypatch.setattr(hop, "save_checkpoint", keep_all)
    folder = Path(run(tmp_path, **SHORT | {"total_timesteps": 48}, save_seconds=0.0, **changes)["checkpoint"]).parent
    rows, last = lines_of(folder), torch.load(folder / "checkpoint.pt")["states"]
    hop.main(hop.make_args(device="cpu", resume=str(folder / "checkpoint_1.pt")))
    assert without_times(lines_of(folder)) == without_times(rows) and len(rows) == 3
    flat = [torch.utils._pytree.tree_flatten(x)[0] for x in (last, torch.load(folder / "checkpoint.pt")["states"])]
    assert len(flat[0]) > 50
    assert all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(*flat, strict=True))


REFUSED = [
    ({"root": "gumbel", "policy_loss": "ppo"}, "--root gumbel needs --policy-loss distill"),
    ({"gamma": 0.05}, "--gamma is too small"),
    ({"method": "hop", "goal_dim": 3}, "--subgoals hop needs --goal-kind discrete --goal-dim 2"),
    ({"num_simulations": 10**9}, "too large for the memory: .* --num-trees, --num-simulations"),
    ({"num_trees": 10**9}, "too large for the memory: .* --num-trees, --num-simulations"),
    ({"imagination": True, "imagined_goals": "prior", "offline_ratio": 0.0}, "needs rule-based games"),
    ({"num_trees": 0}, "--num-trees must be >= 1"),
    ({"q_temperature": 0.0}, "--q-temperature must be > 0"),
    ({"config": dataclasses.replace(CONFIG, prosocial=True)}, "--prosocial .* --search-model env"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_refused_before_anything_is_written(changes, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        run(tmp_path / "runs", **changes)
    assert not (tmp_path / "runs").exists()
    if "prosocial" in words:
        hop.validate(make_args(**changes, search_model="env"))  # the true rules know them


def test_flags_of_imagination_do_not_matter_to_those_who_do_not_imagine():
    hop.validate(make_args(ppo_real_ratio=0.0, imagination_horizon=10**6, imagined_goals="prior", offline_ratio=0.0))


@pytest.mark.cuda
@pytest.mark.parametrize("changes", [{}, {"method": "hop", "root": "gumbel"}], ids=["hopplus-mcts", "hop"])
def test_captured_iterations_equal_eager_ones(changes, tmp_path):
    flags = {"device": "cuda", "precision": "fp32", "total_timesteps": 160, **changes}
    found = [run(tmp_path / str(graphs), cudagraphs=graphs, **flags) for graphs in (False, True)]
    rows = [without_times(lines_of(Path(x["checkpoint"]).parent)) for x in found]
    assert rows[0] == rows[1]
