"""Acting by search: trees are those of a plain-Python search, its models are the game's, and it trains the policy."""

import copy
import dataclasses
import functools
import itertools
import math
import random
import shutil
from pathlib import Path

import hopplus_mcts as hop
import hopplus_ppo as ppo
from stag_hunt_env import (
    HUNT_HARE,
    HUNT_STAG,
    NUM_ACTIONS,
    STAY,
    Run,
    StagHuntConfig,
    StagHuntEnv,
    State,
    seats_table,
)

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
    same_tree,
    seeded,
    without_times,
)

CPU = torch.device("cpu")
CONFIG = StagHuntConfig(height=3, width=4, num_players=3, num_hares=3, final_time=6)
TINY = {
    "device": "cpu",
    "config": CONFIG,
    "num_envs": 4,
    "num_steps": 8,
    "total_timesteps": 64,
    "log_every": 1,
    "policy_hidden": 16,
    "update_epochs": 2,
    "num_minibatches": 2,
    "subgoal_hidden": 8,
    "subgoal_batch_size": 2,
    "wm_hidden": 16,
    "wm_batch_size": 16,
    "pretraining_updates": 8,
    "pretraining_games": 4,
    "replay_rollouts": 2,
    "imagination_horizon": 4,
    "trust_exact_match": 0.0,
    "num_simulations": 6,
    "num_trees": 2,
}


def make_args(script=hop, **changes):
    return script.make_args(**{"method": "hopplus-mcts", **TINY, **changes})


def silent(name):
    pass


def highest_payoff(config):
    return max(abs(payoff) for payoff in config.payoffs())


# ---------------------------------------------------------------------------------------------------------------------
# The batched search and the plain one grow the same trees


class Numbers:
    """Networks that say something else about every position: numbers drawn from what stands there. Half of the
    positions have the legal actions of the game, the others any. Values grow with the highest payoff."""

    def __init__(self, config):
        self.config = config
        self.known = {}
        self.scale = highest_payoff(config)

    def __call__(self, game, seat, tree, last_joint):
        walls = sorted(game.walls)
        board = game.position, game.present, game.prey, game.alive, walls
        key = repr((seat, *board, game.time, game.first_hunt, tuple(last_joint)))
        if (key, tree) not in self.known:
            self.known[key, tree] = self.said(game, seat, tree, key)
        return self.known[key, tree]

    def said(self, game, seat, tree, key):
        r = random.Random(key)
        legal = sorted(reference_game.legal_actions(self.config, game, seat))
        if r.random() < 0.5:
            legal = sorted(r.sample(range(NUM_ACTIONS), r.randint(1, NUM_ACTIONS)))
        policy = reference.softmax({action: r.gauss(0, 1.5) for action in legal})
        logits = {action: math.log(p) for action, p in policy.items()}
        value = r.uniform(-0.4, 1.2) * self.scale
        r = random.Random(f"{key}, {tree}")  # each tree expects something else of the others
        expected = []
        for _ in range(self.config.num_players - 1):
            weights = [r.random() * (r.random() < 0.7) for _ in range(NUM_ACTIONS)]
            weights[r.randrange(NUM_ACTIONS)] += 0.1
            expected.append([weight / sum(weights) for weight in weights])
        return reference.Said(logits, value, expected)


class Model:
    """The same game and networks for both searches; each step costs something. A position of the plain search is
    (game, seat, tree, last joint action); of the batched one, `history` holds these numbers in a row."""

    def __init__(self, config, dtype=torch.float64):
        self.config = config
        self.env = StagHuntEnv(config)
        self.dtype = dtype
        self.networks = Numbers(config)
        self.cost = highest_payoff(config) / 50

    def network(self, position):  # the plain search's
        return self.networks(*position)

    def step(self, position, joint):  # the plain search's
        game, seat, tree, _ = position
        players = self.config.num_players
        after = copy.deepcopy(game)
        actions = [joint[(i - seat) % players] for i in range(players)]
        rewards, _, over = reference_game.step(self.config, after, actions)
        reward = float(rewards[seat]) - self.cost
        return (after, seat, tree, joint), reward, over or not after.present[seat]

    def pack(self, state, seat, tree, joint):
        """State of T games, seat, tree [T] -> Position"""
        fields = [x.long().view(len(seat), -1) for x in state]
        row = torch.cat([seat[:, None], tree[:, None], *fields], 1)
        no_board = torch.zeros(len(seat), 0)
        return hop.Position(no_board, state.time, state.first_hunt, joint, row)

    def unpack(self, position):
        players = self.config.num_players
        prey = self.config.num_prey
        sizes = [1, 1, players, players, prey, prey, self.config.num_cells, 1, 1]
        seat, tree, cell, present, prey_cell, alive, walls, time, first_hunt = position.history.split(sizes, 1)
        state = State(
            position=cell.int(),
            present=present.bool(),
            prey_position=prey_cell.int(),
            prey_alive=alive.bool(),
            walls=walls.byte(),
            time=time[:, 0].int(),
            first_hunt=first_hunt[:, 0].int(),
        )
        return state, seat[:, 0], tree[:, 0]

    def advance(self, position, joint):
        state, seat, tree = self.unpack(position)
        after, rewards, _, over = self.env.transition(state, joint.gather(1, self.env.unego[seat]))
        reward = rewards.gather(1, seat[:, None])[:, 0].to(self.dtype) - self.cost
        here = after.present.gather(1, seat[:, None])[:, 0]
        return self.pack(after, seat, tree, joint), reward, over | ~here

    def evaluate(self, position):
        state, seat, tree = self.unpack(position)
        rows = zip(games_of(state), seat.tolist(), tree.tolist(), position.last_joint.tolist(), strict=True)
        said = [self.networks(*row) for row in rows]
        logits = [[x.logits.get(action, hop.ILLEGAL) for action in range(NUM_ACTIONS)] for x in said]
        values = [x.value for x in said]
        expected = [x.expected for x in said]
        return tuple(torch.tensor(x, dtype=self.dtype) for x in (logits, values, expected))


def random_states(env, generator):
    """Games of every age, some over"""
    kinds = random_kinds(env, generator)
    state = env.initial_state()
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
        generator = seeded(seed)
        config = model.config
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


def grow(args, model, roots):
    scale = highest_payoff(model.config)
    callbacks = (model.advance, model.evaluate)
    return hop.search(args, scale, roots.position, roots.ended, *callbacks, roots.uniform, roots.gumbel, silent)


def nonzero(numbers):
    """{place: number} of those that are not 0"""
    return {place: number for place, number in enumerate(numbers) if number}


def legal_actions(log_policy):
    """bool [..., A]"""
    return log_policy > hop.ILLEGAL / 2


def assert_same_tree(row, tree, plain):
    """Row `row` of a batched tree and a plain one"""
    pointed_at = {0}
    for number in range(tree.visits.shape[1] - 1):  # the last one is the spare node
        visits = tree.visits[row, number].tolist()
        if number not in plain:
            assert not any(visits), f"row {row}: node {number} was visited"
            continue
        node = plain[number]
        where = f"row {row}, node {number}"
        assert nonzero(visits) == {action: count for action, count in node.visits.items() if count}, where
        assert nonzero(tree.child[row, number].tolist()) == node.child, where
        legal = legal_actions(tree.log_policy[row, number])
        assert set(legal.nonzero()[:, 0].tolist()) == set(node.said.logits), where
        for action in node.tried():
            q = tree.returns[row, number, action].item() / visits[action]
            assert q == pytest.approx(node.q(action), abs=1e-9), where
        assert tree.value[row, number].item() == pytest.approx(node.value, abs=1e-12), where
        assert bool(tree.ended[row, number]) == node.ended, where
        if number > 0:
            assert tree.reward[row, number].item() == node.reward, where
            assert tuple(tree.position.last_joint[row, number].tolist()) == node.joint, where
        pointed_at |= set(node.child.values())
    assert pointed_at == set(plain)


def plain_settings(args, config):
    return reference.Settings(
        root=args.root,
        planner=args.planner,
        puct=args.puct,
        scale=highest_payoff(config),
        gamma=args.gamma,
        q_temperature=args.q_temperature,
        search_prior=args.search_prior,
        max_depth=args.max_depth,
    )


def plain_trees(settings, model, roots):
    state, seats, numbers = model.unpack(roots.position)
    joints = [tuple(x) for x in roots.position.last_joint.tolist()]
    positions = zip(games_of(state), seats.tolist(), numbers.tolist(), joints, strict=True)
    trees = []
    for row, position in enumerate(positions):
        uniform = roots.uniform[:, row].tolist()
        gumbel = roots.gumbel[row].tolist()
        ended = bool(roots.ended[row])
        trees.append(reference.search(settings, position, ended, model.network, model.step, uniform, gumbel))
    return trees


def assert_same_decision(args, decision, root_policy, verdict):
    """What root_policy says about this decision, and the plain search's verdict"""
    log_probs, played, visits, q = (x[decision] for x in root_policy)
    improved, tried, worth, chosen = verdict
    for action in range(NUM_ACTIONS):
        assert log_probs[action].exp() == pytest.approx(improved.get(action, 0.0), abs=1e-9)
        assert visits[action] == tried.get(action, 0)
        assert action not in worth or q[action] == pytest.approx(worth[action], abs=1e-9)
    if args.root == "gumbel" and args.planner == "mcts":
        assert played.tolist() == [action == chosen for action in range(NUM_ACTIONS)]
    else:
        assert torch.equal(played, log_probs.exp())


def compare(args, model, roots, simulations):
    settings = plain_settings(args, model.config)
    trees = args.num_trees
    tree = grow(args, model, roots)
    plain = plain_trees(settings, model, roots)
    depths = []
    repeated = 0
    for row, nodes in enumerate(plain):
        assert_same_tree(row, tree, nodes)
        count = sum(nodes[0].visits.values())
        expected = simulations if args.planner == "mcts" else len(nodes[0].visits)
        assert count == (0 if roots.ended[row] else expected)
        edges = sum(sum(node.visits.values()) for node in nodes.values())
        depths.append(edges / max(1, count))
        repeated += len(nodes) < count + 1
    root_policy = hop.root_policy(args, settings.scale, tree, roots.gumbel, trees)
    for decision in range(len(plain) // trees):
        first = decision * trees
        verdict = reference.verdict(settings, plain[first : first + trees], roots.gumbel[first].tolist())
        assert_same_decision(args, decision, root_policy, verdict)
    assert 0 < roots.ended.sum() < len(depths) / 2, "some games are over, most are not"
    if args.planner == "mcts":
        assert repeated > 5
        assert max(depths) > (1.4 if args.max_depth == 2 else 2.0)


BOARDS = {
    "4x4": StagHuntConfig(num_players=3, num_hares=3, final_time=7),
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
    roots = Roots(model, 84 // trees, trees, simulations, seed=simulations + max_depth)
    compare(args, model, roots, simulations)


@pytest.mark.parametrize(("root", "trees"), [("puct", 3), ("gumbel", 1)])
def test_one_step_ahead_tries_each_legal_action_once(root, trees):
    args = make_args(root=root, planner="one-step", num_trees=trees, gamma=0.7, q_temperature=4.0, search_prior=0.6)
    model = Model(BOARDS["4x4"])
    roots = Roots(model, 60 // trees, trees, NUM_ACTIONS, seed=5)
    compare(args, model, roots, NUM_ACTIONS)


def test_one_step_ahead_asks_for_no_simulations():
    """All legal actions are tried, however few --num-simulations there are"""
    state = make_state(planner="one-step", num_simulations=2, num_envs=8)
    steps, outputs, *_ = play(state, 8)
    there = steps.board[..., 0] < CONFIG.num_cells
    expected = state.args.num_trees * (outputs["legal"] & there[..., None])
    assert torch.equal(outputs["visits"].long(), expected) and (expected[..., HUNT_HARE] > 0).any()


def test_paths_longer_than_need_be_change_nothing():
    """--compile walks to one of four depths"""
    model = Model(BOARDS["4x4"])
    roots = Roots(model, 30, 1, 18, seed=4)
    flags = {"gamma": 0.9, "q_temperature": 5.0}
    eager = grow(make_args(**flags), model, roots)
    compiled = grow(make_args(**flags, compile=True), model, roots)
    for name in set(hop.Tree._fields) - {"position"}:
        assert torch.equal(getattr(compiled, name)[:, :-1], getattr(eager, name)[:, :-1]), name
    assert not torch.equal(eager.visits[:, -1], compiled.visits[:, -1]), "the spare node is visited more often"


def test_sequential_halving_of_all_sizes():
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


def check_transition(env, state, actions, seat):
    """env_transition of games in this state, each seen from its seat, is that of the game"""
    config = env.config
    rows = torch.arange(env.num_envs)
    after, rewards, _, done = env.transition(state, actions)
    board = env.cells(state)[rows, seat]
    walls = state.walls[:, : config.num_wall_cells]
    position = hop.Position(board, state.time, state.first_hunt, None, None)
    joint = actions.gather(1, (seat[:, None] + torch.arange(config.num_players)) % config.num_players)
    next_board, reward = hop.env_transition(env, position, walls, joint)
    assert_same("board", next_board, env.cells(after)[rows, seat])
    assert_same("reward", reward, rewards[rows, seat])
    going = ~env.game_over(state) & state.present[rows, seat]
    ended, hunt = hop.imagined_end(config, board, next_board, state.time + 1, state.first_hunt)
    done = done | ~after.present[rows, seat]
    assert torch.equal(ended[going], done[going])
    assert torch.equal(hunt[going], after.first_hunt[going])
    return after


@pytest.mark.parametrize("config", RULES.values(), ids=RULES)
def test_env_transition_is_the_game(config):
    games = 30
    players = config.num_players
    generator = seeded(4)
    env = StagHuntEnv(config, games, seed=6)
    seen_left = seen_caught = False
    for _ in range(2):
        state = random_states(env, generator)
        actions = mixed_actions(env, state, random_kinds(env, generator), 0.3, generator)
        seats = [torch.full((games,), seat) for seat in range(players)]
        seats.append(torch.randint(players, (games,), generator=generator))
        for seat in seats:
            after = check_transition(env, state, actions, seat)
        seen_left |= bool((~state.present).any())
        seen_caught |= bool((state.prey_alive & ~after.prey_alive).any())
    assert seen_left and seen_caught


def make_state(**changes):
    args = make_args(**changes)
    seeds = list(range(args.seed, args.seed + args.num_seeds))
    tables = [seats_table(args.seats, args.config.num_players)] * args.num_seeds
    state = hop.make_train_state(args, tables, seeds, CPU)
    with torch.no_grad():  # networks that say more than those that have learned nothing
        for network in state.networks.present().values():
            for p in network.parameters():
                noise = torch.randn(p.shape, generator=seeded(p.numel()))
                size = 0.3 if p.dim() == 2 or p.shape[2] in (1, 7) else 0.05
                p.add_(size * noise)
    return state


@dataclasses.dataclass
class Search:
    """One call of plan_actions: what it was given and what it found"""

    args: hop.Args
    env: StagHuntEnv
    networks: hop.Networks
    infer: object
    position: hop.Position
    walls: torch.Tensor
    belief: hop.OpponentBelief
    plan: hop.Plan = None
    tree: hop.Tree = None
    random_state: torch.Tensor = None

    def run(self, **changes):
        """The same once more, with the same random numbers. -> Search"""
        again = dataclasses.replace(self, **changes)
        torch.set_rng_state(self.random_state)
        again.plan, again.tree = hop.plan_actions(
            again.args,
            again.env,
            again.networks,
            again.infer,
            again.position,
            again.walls,
            again.belief,
            silent,
        )
        return again

    def for_trees(self, x):
        """[M, E, ...] -> [M, E * trees, ...]"""
        return x.repeat_interleave(self.args.num_trees, 1)


def play(state, num_steps, **options):
    """-> Transitions, outputs, episodes, [Search] of each step"""
    plan_actions = hop.plan_actions
    searches = []

    def keep(*inputs):
        random_state = torch.get_rng_state()
        plan, tree = plan_actions(*inputs)
        searches.append(Search(*inputs[:-1], plan, tree, random_state))
        return plan, tree

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hop, "plan_actions", keep)
        played = hop.rollout(state.args, state.games, state.networks, num_steps, **options)
    return *played, searches


class TrueWorld:
    """The rules in the place of the world model"""

    def __init__(self, env, walls):
        self.env = env
        self.walls = walls

    def __call__(self, board, walls, joint, method):
        assert method == "predict"
        assert torch.equal(walls, self.walls)
        clock = torch.zeros(board.shape[:2].numel(), dtype=torch.int32)
        position = hop.Position(board.flatten(0, 1), clock, clock - 1, None, None)
        after, reward = hop.env_transition(self.env, position, walls.flatten(0, 1), joint.flatten(0, 1))
        return after.view_as(board), reward.view(board.shape[:2])


WALLS = StagHuntConfig(4, 5, 3, num_hares=2, max_wall_pieces=2, final_time=6)


@pytest.mark.parametrize("config", [CONFIG, WALLS], ids=["open", "walls"])
@pytest.mark.parametrize("share", [True, False])
def test_a_perfect_world_model_searches_as_the_rules_do(share, config):
    state = make_state(search_model="env", num_envs=6, share_parameters=share, num_seeds=2, config=config)
    *_, searches = play(state, 4)
    for search in searches:
        world = TrueWorld(search.env, search.for_trees(search.walls))
        again = search.run(
            args=dataclasses.replace(search.args, search_model="world-model"),
            networks=search.networks._replace(world=world),
        )
        for name in ("visits", "returns", "child"):
            assert torch.equal(getattr(again.tree, name)[:, :-1], getattr(search.tree, name)[:, :-1]), name
        for name in hop.Plan._fields:
            assert torch.equal(getattr(again.plan, name), getattr(search.plan, name)), name


SEARCHED = {
    "world model": {},
    "env": {"search_model": "env", "num_trees": 3},
    "walls": {"config": WALLS},
    "in the tree": {"infer_in_tree": True},
    "actions": {"subgoals": "actions"},
    "actions in the tree": {"subgoals": "actions", "infer_in_tree": True, "goal_kind": "discrete"},
    "no subgoals": {"subgoals": "none", "search_model": "env"},
    "hop": {"method": "hop", "num_trees": 3},
    "hop in the tree": {"method": "hop", "infer_in_tree": True},
}


class NodeCheck:
    """Node number `node` of all trees of a search"""

    def __init__(self, search, node):
        self.search = search
        self.args = search.args
        self.env = search.env
        self.node = node
        self.learners = len(search.walls)
        tree = search.tree
        self.known = torch.ones_like(tree.ended[:, 0])  # bool [T]: the tree has this node
        if node > 0:
            self.known, edge = (tree.child[:, :-1] == node).flatten(1).max(1)
            self.parent = edge // NUM_ACTIONS
            self.action = edge % NUM_ACTIONS
        self.position = hop.Position(*(self.by_learner(x[:, node]) for x in tree.position))
        self.clock = self.position.time / self.env.config.final_time
        self.views = self.seen(self.position.board)

    def by_learner(self, x):
        """[T, ...] -> [M, n, ...]"""
        return x.unflatten(0, (self.learners, -1))

    def seen(self, board):
        return hop.entity_views(self.env, board, self.search.for_trees(self.search.walls))

    def policy_goals(self):
        """[M, n, _] what the policy reads about the co-players here"""
        search = self.search
        if self.args.infer_in_tree:
            given = self.views, self.clock, self.position.history
            return hop.infer_opponents(self.args, self.env, search.networks, *given).goals
        if self.args.subgoals != "actions":
            return search.for_trees(search.belief.goals)
        # What MOA expects of co-players that pursue what they did at the root.
        means = search.belief.params.chunk(2, 2)[0].unflatten(1, (-1, 2))
        means = search.for_trees(means)
        said = []
        for k in (0, 1):
            board, walls, legal = (x[:, :, 1 + k] for x in self.views)
            log_probs = search.networks.moa(board, walls, self.clock, means[:, :, k], legal)
            said.append(log_probs.exp().detach())
        return torch.cat(said, 2)

    def check_networks(self):
        """Legal actions, policy, value and what is expected of the co-players"""
        tree = self.search.tree
        known = self.by_learner(self.known)
        ended = self.by_learner(tree.ended[:, self.node])
        own_value = self.by_learner(tree.value[:, self.node])
        opponent_probs = self.by_learner(tree.opponent_probs[:, self.node])
        goals = self.policy_goals()
        policy = self.search.networks.policy
        _, legal, log_probs, value = hop.evaluate_policy(
            self.args, policy, self.views, self.clock, self.position.last_joint, goals
        )
        assert torch.equal(legal, self.views[2][:, :, 0])
        assert not (log_probs.exp() * ~legal).any()
        assert not (opponent_probs * ~self.views[2][:, :, 1:])[known].any(), "co-players do what they may"
        torch.testing.assert_close(opponent_probs[known].sum(-1), torch.ones_like(opponent_probs[known][..., 0]))
        if self.args.subgoals == "actions":
            torch.testing.assert_close(opponent_probs.flatten(2)[known], goals[known])
        torch.testing.assert_close(self.by_learner(tree.log_policy[:, self.node])[known], log_probs[known])
        torch.testing.assert_close(own_value[known & ~ended], value[known & ~ended])
        if self.node > 0:
            assert (own_value[known & ended] == 0).all(), "nothing is earned after an end"

    def check_step(self):
        """The step that led here. -> how many trees have this node, in how many of them the game ends here"""
        search = self.search
        tree = search.tree
        config = self.env.config
        known = self.known
        rows = torch.arange(len(known))
        before = hop.Position(*(x[rows, self.parent] for x in tree.position))
        here = hop.Position(*(x[:, self.node] for x in tree.position))
        joint = here.last_joint
        assert torch.equal(joint[known, 0], self.action[known])
        expected = tree.opponent_probs[rows, self.parent].gather(2, joint[:, 1:, None])
        assert (expected[known] > 0).all()
        walls = search.for_trees(search.walls)
        if self.args.search_model == "env":
            board, reward = hop.env_transition(self.env, before, walls.flatten(0, 1), joint)
        else:
            step = self.by_learner(before.board), walls, self.by_learner(joint)
            board, reward = hop.predict_step(search.networks.world, *step)
            board = board.flatten(0, 1)
            reward = reward.flatten()
        ended, hunt = hop.imagined_end(config, before.board, board, before.time + 1, before.first_hunt)
        assert torch.equal(here.time[known], before.time[known] + 1)
        assert torch.equal(here.first_hunt[known], hunt[known])
        assert torch.equal(here.board[known], board[known])
        assert torch.equal(tree.reward[:, self.node][known], reward[known])
        assert torch.equal(tree.ended[:, self.node][known], ended[known])
        if self.args.infer_in_tree:
            self.check_history(hop.Position(*(self.by_learner(x) for x in before)))
        return int(known.sum()), int(ended[known].sum())

    def check_history(self, before):
        """What was believed before the step, and what the step adds"""
        networks = self.search.networks
        clock = before.time / self.env.config.final_time
        given = self.seen(before.board), clock, before.history
        belief = hop.infer_opponents(self.args, self.env, networks, *given)
        no_end = torch.zeros_like(before.time, dtype=torch.bool)
        step = self.position.last_joint, before.history, no_end
        history = hop.update_history(self.args, self.env, networks, belief, *step)
        known = self.by_learner(self.known)
        torch.testing.assert_close(self.position.history[known], history[known])


@pytest.mark.parametrize("changes", SEARCHED.values(), ids=SEARCHED)
def test_every_node_holds_what_rules_and_networks_say(changes):
    """Along every edge: the next board and reward, the end, the history, legal actions, policy and value"""
    state = make_state(num_envs=4, **changes)
    *_, searches = play(state, 3)
    checked = ended = 0
    for search in searches[1:]:
        tree = search.tree
        num_cells = search.env.config.num_cells
        assert torch.equal(tree.ended[:, 0], tree.position.board[:, 0, 0] == num_cells)
        root = search.for_trees(search.position.board).flatten(0, 1)
        assert torch.equal(tree.position.board[:, 0], root)
        for node in range(tree.visits.shape[1] - 1):
            check = NodeCheck(search, node)
            check.check_networks()
            if node > 0:
                steps, ends = check.check_step()
                checked += steps
                ended += ends
    assert checked > 100 and ended > 5, "trees grew, and into the end of games"


def test_a_bonus_counts_in_the_tree(monkeypatch):
    """Real steps, imagined ones and those of a search go through shape_reward"""

    def shape_reward(args, config, reward, board, joint, next_board):
        moves = (joint[..., 0] < STAY) & (next_board[..., 0] != board[..., 0])
        return reward + moves * 9.0

    monkeypatch.setattr(hop, "shape_reward", shape_reward)
    *_, searches = play(make_state(search_model="env"), 2)
    for search in searches:
        tree = search.tree
        rows, parent, action = tree.child[:, :-1].nonzero(as_tuple=True)
        node = tree.child[rows, parent, action]
        cell = tree.position.board[..., 0]
        moved = (action < STAY) & (cell[rows, node] != cell[rows, parent])
        reward = tree.reward[rows, node]
        assert moved.any() and (reward[moved] >= 9).all()
        assert not moved.all() and (reward[~moved] < 9).all()


SCALES = {  # the game, and its highest payoff without sign
    "default": (CONFIG, 5.0),
    "negative payoffs": (dataclasses.replace(CONFIG, stag_reward=-8.0, hare_reward=-0.5), 4.0),
    "no payoffs": (dataclasses.replace(CONFIG, stag_reward=0.0, hare_reward=0.0), 1.0),
}


def path_length(tree, row, node=0):
    """Edges walked from this node on, by all simulations together"""
    visits = tree.visits[row, node].sum().item()
    children = tree.child[row, node].tolist()
    return visits + sum(path_length(tree, row, child) for child in children if child)


@pytest.mark.parametrize(("config", "scale"), SCALES.values(), ids=SCALES)
def test_each_tree_has_subgoals_of_its_own_and_their_q_are_averaged(config, scale):
    *_, searches = play(make_state(num_trees=3, search_model="env", config=config), 2)
    for search in searches:
        args = search.args
        tree = search.tree
        plan = hop.Plan(*(x.flatten(0, 1) for x in search.plan))
        opponents = tree.opponent_probs[:, 0].unflatten(0, (-1, 3))
        assert (opponents[:, 0] != opponents[:, 1]).any() and (opponents[:, 0] != opponents[:, 2]).any()
        visits = tree.visits[:, 0]
        q = hop.completed_q(visits, tree.returns[:, 0], tree.log_policy[:, 0], tree.value[:, :1])
        q = q.unflatten(0, (-1, 3)).mean(1)
        log_policy = tree.log_policy[::3, 0]
        legal = legal_actions(log_policy)
        expected = args.q_temperature * q / scale + log_policy
        expected = expected.masked_fill(~legal, -1e9).log_softmax(1)
        searched = ~tree.ended[::3, 0]
        torch.testing.assert_close(plan.log_probs[searched], expected[searched])
        torch.testing.assert_close(plan.q, q)
        assert torch.equal(plan.visits, visits.unflatten(0, (-1, 3)).sum(1))
        gain, kl, depth = plan.stats.T
        surplus = plan.log_probs.exp() - log_policy.exp()
        torch.testing.assert_close(gain, (surplus * q).sum(1))
        ratio = torch.where(legal, plan.log_probs - log_policy, 0.0).clamp(-50, 50)
        torch.testing.assert_close(kl, (plan.log_probs.exp() * ratio).sum(1))
        lengths = [path_length(tree, row) / args.num_simulations for row in range(len(visits))]
        torch.testing.assert_close(depth, torch.tensor(lengths).view(-1, 3).mean(1))


CO_PLAYERS = {  # how co-players' subgoals come about
    "continuous": {},
    "discrete": {"goal_kind": "discrete", "goal_dim": 3},
    "in the tree": {"infer_in_tree": True},
    "hop": {"method": "hop"},
}
NUM_TREES = 800


@functools.cache
def many_trees(name):
    """A decision of the middle of a game, with many trees of two simulations -> Search"""
    state = make_state(num_envs=3, **{"search_model": "env", **CO_PLAYERS[name]})
    with torch.no_grad():  # else different subgoals lead to much the same
        for p in state.networks.inference.parameters():
            p.mul_(3)
        for p in state.networks.moa.parameters():
            p.mul_(1.5)
        state.networks.moa.params["head.0.weight"][:, -state.args.goal_dim :].mul_(7)
    *_, searches = play(state, 3)
    search = searches[-1]
    search.random_state = seeded(1).get_state()
    belief = search.belief
    if not search.args.infer_in_tree:  # there it is inferred anew
        first = 2 * torch.randn(belief.params[:, ::2].shape, generator=seeded(2))
        opposite = torch.stack([first, -first], 2)  # of two co-players
        belief = belief._replace(params=opposite.flatten(1, 2))
    args = dataclasses.replace(search.args, num_trees=NUM_TREES, num_simulations=2)
    return search.run(args=args, belief=belief)


@pytest.mark.parametrize("name", CO_PLAYERS)
def test_each_co_player_pursues_its_own_subgoal(name):
    """What the search expects of a co-player at the root: MOA, averaged over the subgoals inferred of that co-player"""
    search = many_trees(name)
    args = search.args
    config = search.env.config
    m, games, k = search.belief.present.shape
    ours = search.tree.opponent_probs[:, 0].unflatten(0, (m, games, NUM_TREES)).mean(2)
    views = hop.entity_views(search.env, search.position.board, search.walls)
    params = search.belief.params.unflatten(1, (games, k))
    expected = torch.zeros(k, *ours.shape)  # [whose subgoal, M, E, K, A]
    torch.manual_seed(2)
    for whose, j in itertools.product(range(k), range(k)):
        noise = hop.goal_noise(args, m, games, NUM_TREES, device=CPU)
        goals = hop.sample_goal(args.goal_kind, params[:, :, whose, None], noise)
        board, walls, legal = (x[:, :, 1 + j].repeat_interleave(NUM_TREES, 1) for x in views)
        clock = (search.position.time / config.final_time).repeat_interleave(NUM_TREES, 1)
        said = search.networks.moa(board, walls, clock, goals.flatten(1, 2), legal).detach().exp()
        expected[whose, :, :, j] = said.unflatten(1, (games, NUM_TREES)).mean(2)
    own = torch.stack([expected[j, :, :, j] for j in range(k)], 2)
    other = torch.stack([expected[1 - j, :, :, j] for j in range(k)], 2)
    assert (own - other).abs().amax() > 0.3, "another's subgoal would be noticed"
    torch.testing.assert_close(ours, own, atol=0.1, rtol=0)


def test_co_players_draw_their_subgoals_independently():
    """Of each other, in each tree: over the trees of a decision, what one pursues says nothing about the other"""
    search = many_trees("continuous")
    moa = search.networks.moa
    read = []
    said = search.networks._replace(moa=lambda *inputs: (read.append(inputs[3]), moa(*inputs))[1])
    search.run(networks=said)
    games, k = search.belief.present.shape[1:]
    goal = read[0].unflatten(1, (games, NUM_TREES, k))  # at the root, [M, E, trees, K, D]
    goal = goal - goal.mean(2, keepdim=True)
    one, other = goal.unbind(3)
    correlation = (one * other).mean(2) / (one.square().mean(2) * other.square().mean(2)).sqrt()
    assert (correlation.abs() < 0.2).all()


def test_gumbel_noise_belongs_to_the_decision():
    """All its trees have the same, drawn so that the first action follows the policy; each decision has its own"""
    state = make_state(num_envs=500, root="gumbel", num_trees=2, num_simulations=1, search_model="env")
    *_, searches = play(state, 1)
    tree = searches[0].tree
    first = tree.position.last_joint[:, 1, 0].view(-1, 2)
    assert torch.equal(first[:, 0], first[:, 1])
    probs, order = tree.log_policy[::2, 0].exp().sort(dim=1, descending=True)
    rank = (order == first[:, :1]).int().argmax(1)
    expected = probs.sum(0)
    counts = torch.bincount(rank, minlength=NUM_ACTIONS)
    rare = expected.sum() - expected.cumsum(0) < 30  # this and all that are rarer make the last bin
    expected = torch.cat([expected[~rare], expected[rare].sum(0, keepdim=True)])
    counts = torch.cat([counts[~rare], counts[rare].sum(0, keepdim=True)])
    assert chi_square_p(counts, expected) > 1e-3
    assert expected.max() < 0.6 * len(rank)


# ---------------------------------------------------------------------------------------------------------------------
# HOP's belief: stag or hare, by Bayes' rule


@torch.no_grad()
def likelihoods(state, steps, t):
    """Step t of Transitions -> [M, n, K, 2, 7] MOA's log-probabilities of each co-player's actions, goal by goal;
    present [M, n, K]"""
    env = state.games.env
    players = env.config.num_players
    k = players - 1
    board = steps.board[:, t]
    views = hop.entity_views(env, board, steps.walls[:, t])
    seen, walls, legal = (x[:, :, 1:].flatten(1, 2) for x in views)
    clock = (steps.time[:, t] / env.config.final_time).repeat_interleave(k, 1)
    said = []
    for goal in torch.eye(2):
        said.append(state.networks.moa(seen, walls, clock, goal.expand(*clock.shape, 2), legal))
    present = board[:, :, 1:players] < env.config.num_cells
    return torch.stack(said, 2).unflatten(1, (-1, k)), present


def who_left(steps, config):
    """bool [M, T, E, N]: who left the board with the step"""
    before = steps.board[..., : config.num_players] < config.num_cells
    after = steps.next_board[..., : config.num_players] < config.num_cells
    return before & ~after


def bayes(evidence, prior):
    """Prior times likelihood, by hand"""
    weights = [often * math.exp(score - max(evidence)) for score, often in zip(evidence, prior, strict=True)]
    return [weight / sum(weights) for weight in weights]


class BeliefByHand:
    """About one co-player. The prior is b0 = alpha b0 + (1 - alpha) 1[goal], by what the co-player was seen to take,
    from 1/2 on."""

    def __init__(self, discount):
        self.discount = discount
        self.evidence = np.zeros(2)
        self.prior = np.full(2, 0.5)

    def probs(self):
        return bayes(self.evidence, np.maximum(self.prior, 1e-6))

    def history(self):
        return [*self.evidence, *(self.prior - 0.5)]

    def saw_action(self, scores):
        """Log-probabilities of what it did, given either goal"""
        clamped = np.maximum(scores, -10.0)
        self.evidence += clamped - clamped.max()

    def saw_prey(self, goal):
        self.prior = self.discount * self.prior + (1 - self.discount) * np.eye(2)[goal]

    def game_over(self):
        if self.discount == 0:
            self.prior = np.full(2, 0.5)
        self.evidence = np.zeros(2)


@pytest.mark.parametrize("discount", [0.7, 0.0])
def test_belief_in_stag_or_hare_by_hand(discount, monkeypatch):
    state = make_state(
        method="hop",
        num_envs=5,
        memory_discount=discount,
        history_reset_prob=0.0,
        planner="none",
        seats="learner,learner,nearest_stag",
    )
    state.networks.moa.params["encoder.table"].data.mul_(30)  # so that some action is as good as impossible
    infer_opponents = hop.infer_opponents
    beliefs = []

    def keep(*given):
        beliefs.append(infer_opponents(*given))
        return beliefs[-1]

    monkeypatch.setattr(hop, "infer_opponents", keep)
    by_hand = {place: BeliefByHand(discount) for place in np.ndindex(2, 5, 2)}
    seen = {"left": 0, "clamped": 0, "ends": 0, "stag": 0, "hare": 0, "nothing": 0}
    for _ in range(40):
        kept = torch.tensor([belief.history() for belief in by_hand.values()]).view(2, 5, 2, 4)
        torch.testing.assert_close(state.games.history, kept.float(), atol=1e-3, rtol=1e-4)
        beliefs.clear()
        steps, outputs, *_ = play(state, 1)
        believed = beliefs[0].params.exp().view(2, 5, 2, 2)  # before the step
        rough = hop.bayes_posterior(steps.history[:, 0].float()).exp()  # what metrics are made of
        torch.testing.assert_close(rough, believed, atol=0.02, rtol=0)
        assert outputs["goals"].shape[3] == 0, "the policy reads none of it"
        acts, present = likelihoods(state, steps, 0)
        left = who_left(steps, CONFIG)[:, 0]
        for (m, e, k), belief in by_hand.items():
            action = int(steps.joint[m, 0, e, 1 + k])
            has_left = bool(left[m, e, 1 + k])
            assert believed[m, e, k].tolist() == pytest.approx(belief.probs(), abs=1e-4)
            if present[m, e, k]:
                scores = acts[m, e, k, :, action].numpy()
                belief.saw_action(scores)
                seen["clamped"] += scores.min() < -10
            else:
                seen["left"] += 1
            if has_left:
                goal = {HUNT_STAG: 0, HUNT_HARE: 1}[action]
                belief.saw_prey(goal)
                seen[("stag", "hare")[goal]] += 1
            if steps.done[m, 0, e]:
                belief.game_over()
                seen["nothing"] += bool(present[m, e, k]) and not has_left
                seen["ends"] += 1
    assert all(count > 2 for count in seen.values()), seen


def games_in(done):
    """done bool [T] -> the steps of each game"""
    first = 0
    for t, ends in enumerate(done.tolist()):
        if ends or t == len(done) - 1:
            yield range(first, t + 1)
            first = t + 1


@pytest.mark.parametrize("ahead", [0, 4])
def test_hop_learns_from_the_prey_that_was_taken(ahead):
    """In these steps or in those ahead, of which MOA learns nothing else"""
    length = 9
    state = make_state(method="hop", num_envs=24, planner="none", seats="learner,mixed,nearest_stag")
    steps, *_ = play(state, length + ahead)
    with torch.no_grad():
        losses = hop.opponent_model_losses(state.args, state.games.env, state.networks, steps, 0.5, ahead=ahead)
    said = [likelihoods(state, steps, t) for t in range(length)]
    left = who_left(steps, CONFIG)
    means = []  # each game weighs the same
    seen = {"stag": 0, "hare": 0, "unknown": 0, "left": 0, "taken ahead": 0}
    for e, k in np.ndindex(24, 2):
        actions = steps.joint[0, :, e, 1 + k].tolist()
        for game in games_in(steps.done[0, :, e]):
            if game.start >= length:
                continue
            taken_at = [t for t in game if left[0, t, e, 1 + k]]
            if not taken_at:
                seen["unknown"] += 1
                continue
            goal = {HUNT_STAG: 0, HUNT_HARE: 1}[actions[taken_at[0]]]
            inside = [t for t in game if t < length]
            counted = [t for t in inside if said[t][1][0, e, k]]
            seen[("stag", "hare")[goal]] += 1
            seen["left"] += len(inside) - len(counted)
            seen["taken ahead"] += taken_at[0] >= length
            errors = [-float(said[t][0][0, e, k, goal, actions[t]]) for t in counted]
            means.append(np.mean(errors))
    if not ahead:
        del seen["taken ahead"]
    assert all(count > 2 for count in seen.values()), seen
    assert losses["moa"].item() == pytest.approx(np.mean(means), rel=1e-4)
    assert torch.equal(losses["moa"], losses["loss"])


def make_batch(state, steps, outputs):
    samples = hop.real_samples(state.args, state.args.config, steps, outputs)
    return hop.make_ppo_batch(state.args, samples, real=True)


# ---------------------------------------------------------------------------------------------------------------------
# The loop


PLAYED = [{}, {"root": "gumbel", "num_trees": 1}, {"method": "hop", "seats": "learner,random,learner"}]


@pytest.mark.parametrize("changes", PLAYED)
def test_learners_play_what_they_searched(changes):
    state = make_state(num_envs=8, **changes)
    steps, outputs, _, searches = play(state, 8)
    moved = 0.0
    assert len(searches) == 8
    for t, search in enumerate(searches):
        plan = search.plan
        legal = outputs["legal"][:, t]
        assert torch.equal(outputs["log_probs"][:, t], plan.log_probs)
        assert torch.equal(outputs["played"][:, t], plan.played)
        assert torch.equal(outputs["visits"][:, t], plan.visits)
        assert torch.equal(outputs["q"][:, t], plan.q)
        assert torch.equal(outputs["search"][:, t], plan.stats)
        for name in ("board", "time", "first_hunt", "last_joint"):
            root = getattr(search.position, name)
            assert torch.equal(root, getattr(steps, name)[:, t].to(root.dtype)), name
        assert (plan.played.gather(2, steps.joint[:, t, :, :1].long()) > 0).all()
        assert (plan.played[~legal] == 0).all() and (plan.visits[~legal] == 0).all(), "only legal actions are played"
        assert (plan.log_probs.exp()[~legal] == 0).all()
        own_log_probs, value = state.networks.policy(outputs["inputs"][:, t], legal)
        torch.testing.assert_close(outputs["value"][:, t], value)
        moved += (own_log_probs.exp() - plan.log_probs.exp()).abs().sum(2).max().item()
    assert moved > 1
    batch = make_batch(state, steps, outputs)
    action = steps.joint[..., :1].long()
    torch.testing.assert_close(batch["log_prob"], outputs["log_probs"].gather(3, action).flatten(1))
    present = steps.board[..., 0] < CONFIG.num_cells
    assert torch.equal(batch["distilled"], present.float().flatten(1))


def test_nobody_searches_who_only_watches_or_has_no_planner():
    watched = make_state()
    watched.games = watched.watched
    for state in (watched, make_state(planner="none")):
        _, outputs, _, searches = play(state, 3)
        assert not searches
        assert outputs.keys() == {"inputs", "legal", "log_probs", "goals", "value"}


def learned(state, batch, **changes):
    """Copies of the policy's weights after ppo_update, and the metrics"""
    args = dataclasses.replace(state.args, **changes)
    policy = state.networks.policy
    before = {name: p.clone() for name, p in policy.state_dict().items()}
    optimizer = hop.Adam(policy.parameters(), args.learning_rate)
    torch.manual_seed(9)
    metrics = hop.ppo_update(args, policy, optimizer, batch)
    after = {name: p.clone() for name, p in policy.state_dict().items()}
    policy.load_state_dict(before)
    return after, metrics


def real_batch(state, num_steps=8):
    steps, outputs, *_ = play(state, num_steps)
    return make_batch(state, steps, outputs)


def weighted_mean(x, weight):
    return (x * weight).sum(1) / weight.sum(1)


def cross_entropy(state, batch):
    with torch.no_grad():
        log_probs, _ = state.networks.policy(batch["inputs"], batch["legal"])
    loss = -(batch["log_probs"].exp() * log_probs.clamp(min=-50)).sum(2)
    return weighted_mean(loss, batch["weight"])


ONCE = {"update_epochs": 1, "num_minibatches": 1}
NO_STEP = {**ONCE, "learning_rate": 1e-12}


def same_weights(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def test_the_policy_learns_what_the_search_found():
    state = make_state(num_envs=16)
    batch = real_batch(state)
    before = cross_entropy(state, batch)
    _, metrics = learned(state, batch, **NO_STEP)
    torch.testing.assert_close(metrics["losses/policy_loss"], before)
    torch.testing.assert_close(metrics["losses/distill"], before)
    after, _ = learned(state, batch, update_epochs=30, ent_coef=0.0, learning_rate=3e-3)
    state.networks.policy.load_state_dict(after)
    probs = batch["log_probs"].exp()
    entropy = weighted_mean(-(probs * probs.clamp(min=1e-30).log()).sum(2), batch["weight"])
    assert (cross_entropy(state, batch) - before < -0.3 * (before - entropy)).all()
    bonus, _ = learned(state, batch, **ONCE, ent_coef=0.5)
    without, _ = learned(state, batch, **ONCE, ent_coef=0.0)
    assert not same_weights(bonus, without), "what is distilled earns its entropy too"
    # What PPO would read changes nothing, even where the action was one that the search hardly ever plays.
    nonsense = {
        **batch,
        "advantage": -batch["advantage"] + 100,
        "action": torch.zeros_like(batch["action"]),
        "log_prob": torch.full_like(batch["log_prob"], -200.0),
    }
    other, metrics = learned(state, nonsense)
    same, _ = learned(state, batch)
    assert same_weights(other, same)
    assert all(value.isfinite().all() for value in metrics.values())


NO_MODELS = {"wm_updates": 0, "subgoal_updates": 0}  # are trained


def test_imagined_samples_are_never_distilled(monkeypatch):
    state = make_state(imagination=True, ppo_real_ratio=0.2, **NO_MODELS)
    hop.watch_rule_based(state)
    ppo_update = hop.ppo_update
    batches = []

    def keep(args, policy, optimizer, batch):
        batches.append(batch)
        return ppo_update(args, policy, optimizer, batch)

    monkeypatch.setattr(hop, "ppo_update", keep)
    hop.train_iteration(state)
    batch = batches[0]
    real = batch["real"] > 0
    assert (batch["weight"][~real] > 0).any() and (batch["distilled"][~real] == 0).all()
    assert torch.equal(batch["distilled"][real], batch["weight"][real]) and batch["weight"][real].any()
    after, _ = learned(state, batch, **ONCE)
    changed = {**batch, "advantage": torch.where(real, batch["advantage"], -batch["advantage"])}
    other, _ = learned(state, changed, **ONCE)
    actor = [name for name in after if "actor" in name]
    assert any((after[name] != other[name]).any() for name in actor), "PPO still learns from them"


def test_search_metrics_count_only_learners_on_the_board():
    state = make_state(num_envs=32, **NO_MODELS)
    hop.train_iteration(state)
    state.metrics.reset()
    samples = hop.train_iteration(state)  # by now somebody has left
    metrics = state.metrics.read()
    present = samples["transitions"].board[..., 0] < CONFIG.num_cells
    assert not present.all()
    for i, name in enumerate(("gain", "kl", "depth")):
        stats = samples["outputs"]["search"][..., i]
        expected = [float(stats[m][present[m]].mean()) for m in range(3)]
        assert metrics[f"search/{name}"].tolist() == pytest.approx(expected, rel=1e-4)
        assert min(expected) > 0


# ---------------------------------------------------------------------------------------------------------------------
# From end to end


def run(run_dir, script=hop, **changes):
    return script.main(make_args(script, run_dir=str(run_dir), **changes))


def rows_of(final):
    """What the run logged that returned this, without times"""
    return without_times(lines_of(Path(final["checkpoint"]).parent))


@pytest.mark.parametrize("method", ["ppo", "ppo-omg", "hopplus"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_without_search_it_has_the_other_scripts_defaults(method, device):
    ours = vars(hop.make_args(method, device))
    theirs = vars(ppo.make_args(method, device))
    assert ours["planner"] == "none"
    for name in theirs.keys() - {"exp_name"}:
        assert ours[name] == theirs[name], name


@pytest.mark.parametrize("device", ["cpu", "cuda"], ids=["on a CPU", "on a GPU"])  # which need not be there
def test_hop_is_the_published_one_everywhere(device, monkeypatch):
    monkeypatch.setattr(hop.game, "resolve_device", torch.device)
    args = hop.make_args("hop", device)
    assert (args.subgoals, args.goal_kind, args.goal_dim, args.imagination) == ("hop", "discrete", 2, False)
    assert (args.planner, args.search_model, args.num_trees, args.search_prior) == ("mcts", "env", 5, 0)
    assert (args.pretraining_updates, args.offline_ratio, args.history_reset_prob) == (0, 0, 0)
    assert (args.gae_lambda, args.ent_coef) == (1, 0)


SHORT = {"num_steps": 4, "total_timesteps": 32, "pretraining_updates": 2, "num_simulations": 4}  # two iterations


def test_without_search_it_is_the_other_script(tmp_path):
    flags = {**TINY, **SHORT, "method": "hopplus"}
    ours = hop.main(hop.make_args(**flags, run_dir=str(tmp_path / "ours")))
    del flags["num_simulations"], flags["num_trees"]
    theirs = ppo.main(ppo.make_args(**flags, run_dir=str(tmp_path / "theirs")))
    rows = rows_of(ours)
    for row in rows:
        assert row.pop("losses/distill") == 0
    assert rows == rows_of(theirs) and len(rows) == 2


@pytest.mark.parametrize("subgoals", ["none", "actions", "inferred", "hop"])
def test_models_are_made_where_something_reads_them(subgoals):
    inferred = subgoals in ("actions", "inferred", "hop")
    planners = ("mcts", "one-step", "none")
    models = ("env", "world-model")
    for planner, model, imagination in itertools.product(planners, models, (False, True)):
        args = make_args(subgoals=subgoals, planner=planner, search_model=model, imagination=imagination)
        searches = planner != "none"
        expected = {"policy"}
        if inferred or searches or imagination:
            expected |= {"prior", "inference", "moa"}
        if (searches and model == "world-model") or imagination:
            expected.add("world")
        assert hop.make_networks(args, [1], CPU).present().keys() == expected
        if "moa" in expected:
            expected.add("moa_prior")
        assert hop.make_networks(args, [1], CPU, pretraining=True).present().keys() == expected


@pytest.mark.parametrize("changes", [{}, {"method": "hop"}], ids=["hopplus-mcts", "hop"])
def test_resumed_run_is_the_same_bit_for_bit(changes, tmp_path, monkeypatch):
    save = Run.save

    def keep_all(run, content):
        save(run, content)
        path = run.folders[0] / "checkpoint.pt"
        shutil.copy(path, path.with_name(f"checkpoint_{content['iteration']}.pt"))

    monkeypatch.setattr(Run, "save", keep_all)
    final = run(tmp_path, **{**SHORT, "total_timesteps": 48}, save_seconds=0.0, **changes)
    path = Path(final["checkpoint"])
    rows = rows_of(final)
    states = torch.load(path)["states"]
    hop.main(hop.make_args(device="cpu", resume=str(path.with_name("checkpoint_1.pt"))))
    assert rows_of(final) == rows and len(rows) == 3
    assert len(torch.utils._pytree.tree_leaves(states)) > 50
    assert same_tree(torch.load(path)["states"], states)


REFUSED = [
    ({"root": "gumbel", "policy_loss": "ppo"}, "--root gumbel needs --policy-loss distill"),
    ({"gamma": 0.05}, "--gamma is too small"),
    ({"method": "hop", "goal_dim": 3}, "--subgoals hop needs --goal-kind discrete --goal-dim 2"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_refused_before_anything_is_written(changes, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        run(tmp_path / "runs", **changes)
    assert not (tmp_path / "runs").exists()


def test_flags_of_imagination_do_not_matter_to_those_who_do_not_imagine():
    hop.validate(make_args(ppo_real_ratio=0.0, imagination_horizon=10**6))


FUSED_WAYS = {
    "puct, in the tree": {"infer_in_tree": True},
    "gumbel, rules": {"root": "gumbel", "search_model": "env", "imagination": True},
}


@pytest.mark.cuda
@pytest.mark.parametrize("changes", FUSED_WAYS.values(), ids=FUSED_WAYS)
def test_a_compiled_search_plays_the_same_games(changes, tmp_path):
    flags = {**SHORT, "device": "cuda", "precision": "fp32", "num_steps": 8, **changes}  # so that games end
    plain = run(tmp_path / "plain", **flags)
    try:
        fast = run(tmp_path / "fast", compile=True, **flags)
    finally:
        hop.fuse(False)
    assert fast["charts/episodic_return"] == plain["charts/episodic_return"]
    for name in ("search/gain", "search/kl", "search/depth", "losses/distill", "losses/value_loss"):
        assert fast[name] == pytest.approx(plain[name], rel=1e-3, abs=1e-5), name


@pytest.mark.cuda
@pytest.mark.parametrize("changes", [{}, {"method": "hop", "root": "gumbel"}], ids=["hopplus-mcts", "hop"])
def test_captured_iterations_equal_eager_ones(changes, tmp_path):
    flags = {"device": "cuda", "precision": "fp32", "total_timesteps": 160, **changes}
    eager = run(tmp_path / "eager", cudagraphs=False, **flags)
    captured = run(tmp_path / "captured", cudagraphs=True, **flags)
    assert rows_of(eager) == rows_of(captured)
