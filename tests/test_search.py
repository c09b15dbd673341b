"""Acting by search: trees are those of a plain-Python search, its models are the game's, and it trains the policy."""

import copy
import dataclasses
import itertools
import math
import random
from types import SimpleNamespace
from unittest import mock

import hopplus_mcts as hop
from stag_hunt_env import HUNT_HARE, HUNT_STAG, NUM_ACTIONS, STAY, StagHuntConfig, StagHuntEnv, State

import numpy as np
import pytest
import reference_game
import reference_search as reference
import torch
from helpers import PRETRAINING_CASES, TINY_CONFIG, games_of, mixed_actions, random_kinds, seeded, tiny_args
from tiny_hopplus import CPU, as_windows

SEARCH = {"num_simulations": 6, "num_trees": 2}
HOP = {"method": "hop", "goal_dim": 2}


def make_args(method="hopplus-mcts", **changes):
    return tiny_args(method, hop, **{**SEARCH, **changes})


def highest_payoff(config):
    return max(abs(payoff) for payoff in config.payoffs())


# ---- The batched search and the plain one grow the same trees
class Model:
    """The same game and networks for both searches; each step costs something. A position of the plain search is
    (game, seat, tree, last joint action); the batched one has these numbers in a row as its `board`."""

    def __init__(self, config):
        self.config = config
        self.env = StagHuntEnv(config)
        self.cost = highest_payoff(config) / 50

    def network(self, position):  # the plain search's
        """Numbers drawn from what stands there. Half of the positions have the legal actions of the game, the others
        any. Values grow with the highest payoff. Each tree expects something else of the others."""
        game, seat, tree, last_joint = position
        board = game.position, game.present, game.prey, game.alive, sorted(game.walls)
        key = repr((seat, *board, game.time, game.first_hunt, tuple(last_joint)))
        r = random.Random(key)
        legal = sorted(reference_game.legal_actions(self.config, game, seat))
        if r.random() < 0.5:
            legal = sorted(r.sample(range(NUM_ACTIONS), r.randint(1, NUM_ACTIONS)))
        policy = reference.softmax({action: r.gauss(0, 1.5) for action in legal})
        logits = {action: math.log(p) for action, p in policy.items()}
        value = r.uniform(-0.4, 1.2) * highest_payoff(self.config)
        r = random.Random(f"{key}, {tree}")
        expected = []
        for _ in range(self.config.num_players - 1):
            weights = [r.random() * (r.random() < 0.7) for _ in range(NUM_ACTIONS)]
            weights[r.randrange(NUM_ACTIONS)] += 0.1
            expected.append([weight / sum(weights) for weight in weights])
        return reference.Said(logits, value, expected)

    def step(self, position, joint):  # the plain search's
        game, seat, tree, _ = position
        players = self.config.num_players
        after = copy.deepcopy(game)
        actions = [joint[(i - seat) % players] for i in range(players)]
        rewards, _, over = reference_game.step(self.config, after, actions)
        reward = float(rewards[seat]) - self.cost
        return (after, seat, tree, joint), reward, over or not after.present[seat]

    def pack(self, state, seat, tree, joint):
        """State of T games, seat, tree [T], joint [T, N] -> what a node [2, T / 2, ...] has of it"""
        fields = [x.long().view(len(seat), -1) for x in state]
        row = torch.cat([seat[:, None], tree[:, None], *fields], 1)
        no_history = torch.zeros(len(seat), self.config.num_players - 1, 0)
        node = {"board": row, "last_joint": joint, "history": no_history}
        node |= {"clock": state.time, "first_hunt": state.first_hunt}
        return {name: x.unflatten(0, (2, -1)) for name, x in node.items()}

    def unpack(self, node):
        """-> State, seat, tree, joint"""
        config = self.config
        sizes = [config.num_players] * 2 + [config.num_prey] * 2 + [config.num_cells, 1, 1]
        seat, tree, *fields = node["board"].flatten(0, 1).split([1, 1, *sizes], 1)
        position, present, prey, alive, walls, time, first_hunt = fields
        cells = position.int(), present.bool(), prey.int(), alive.bool(), walls.byte()
        state = State(*cells, time[:, 0].int(), first_hunt[:, 0].int())
        return state, seat[:, 0], tree[:, 0], node["last_joint"].flatten(0, 1)

    def positions(self, node):
        """As the plain search has them"""
        state, seat, tree, joint = self.unpack(node)
        joint = [tuple(actions) for actions in joint.tolist()]
        return list(zip(games_of(state), seat.tolist(), tree.tolist(), joint, strict=True))

    def expand(self, _, node, joint):  # in the place of the script's
        state, seat, tree, _ = self.unpack(node)
        joint = joint.flatten(0, 1)
        after, rewards, _, over = self.env.transition(state, joint.gather(1, self.env.unego[seat]))
        reward = rewards.gather(1, seat[:, None])[:, 0].double() - self.cost
        here = after.present.gather(1, seat[:, None])[:, 0]
        new = {"reward": reward, "ended": over | ~here}
        new = {name: x.unflatten(0, (2, -1)) for name, x in new.items()}
        return self.pack(after, seat, tree, joint) | new

    def evaluate(self, _, node, *given):  # in the place of the script's
        said = [self.network(position) for position in self.positions(node)]
        found = {
            "log_probs": [[x.logits.get(action, hop.ILLEGAL) for action in range(NUM_ACTIONS)] for x in said],
            "value": [x.value for x in said],
            "others_probs": [x.expected for x in said],
        }
        found = {name: torch.tensor(x, dtype=torch.float64) for name, x in found.items()}
        return node | {name: x.unflatten(0, (2, -1)) for name, x in found.items()}


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
    """`decisions` random positions of two learners, each the root of `trees` trees; the random numbers that a search
    from there draws"""

    def __init__(self, model, decisions, trees, simulations, seed):
        generator = seeded(seed)
        config = model.config
        env = StagHuntEnv(config, decisions, seed=seed)
        rows = torch.arange(decisions).repeat_interleave(trees)
        state = State(*(x[rows] for x in random_states(env, generator)))
        seat = torch.randint(config.num_players, (decisions,), generator=generator)[rows]
        joint = torch.randint(NUM_ACTIONS, (decisions, config.num_players), generator=generator)[rows]
        self.ended = env.game_over(state) | ~state.present.gather(1, seat[:, None])[:, 0]
        self.node = model.pack(state, seat, torch.arange(trees).repeat(decisions), joint)
        self.node |= {"ended": self.ended.view(2, -1), "reward": torch.zeros(2, len(rows) // 2).double()}
        self.seed = seed
        torch.manual_seed(seed)
        uniform = torch.rand(simulations, 2, len(rows) // 2, config.num_players - 1)
        gumbel = torch.rand(2, decisions // 2, NUM_ACTIONS).clamp(1e-6, 1 - 1e-6)
        self.uniform = uniform.flatten(1, 2)
        self.gumbel = -(-gumbel.log()).log().flatten(0, 1)[rows]


def by_tree(tree):
    """Its fields and those of its nodes [M, n, ...] -> [T, ...]"""
    fields = {name: getattr(tree, name) for name in ("visits", "returns", "child")} | tree.nodes
    return SimpleNamespace(**{name: x.flatten(0, 1) for name, x in fields.items()})


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
        assert visits == [node.visits.get(action, 0) for action in range(NUM_ACTIONS)], where
        assert tree.child[row, number].tolist() == [node.child.get(action, 0) for action in range(NUM_ACTIONS)], where
        legal = tree.log_probs[row, number] > hop.ILLEGAL / 2
        assert set(legal.nonzero()[:, 0].tolist()) == set(node.said.logits), where
        for action in node.tried():
            q = tree.returns[row, number, action].item() / visits[action]
            assert q == pytest.approx(node.q(action), abs=1e-9), where
        assert tree.value[row, number].item() == pytest.approx(node.value, abs=1e-12), where
        assert bool(tree.ended[row, number]) == node.ended, where
        if number > 0:
            assert tree.reward[row, number].item() == node.reward, where
            assert tuple(tree.last_joint[row, number].tolist()) == node.joint, where
        pointed_at |= set(node.child.values())
    assert pointed_at == set(plain)


def assert_same_decision(args, plan, logits, verdict):
    """What root_policy says about a decision of which the policy says `logits`, and the plain search's verdict"""
    improved, tried, worth, chosen = verdict
    gain = sum((improved[action] - math.exp(logit)) * worth[action] for action, logit in logits.items())
    kl = sum(p * max(-50, math.log(p or 1e-300) - logits[action]) for action, p in improved.items())
    assert float(plan["search/gain"]) == pytest.approx(gain, abs=1e-6)
    assert float(plan["search/kl"]) == pytest.approx(kl, abs=1e-6)
    for action in range(NUM_ACTIONS):
        assert plan["log_probs"][action].exp() == pytest.approx(improved.get(action, 0.0), abs=1e-9)
        assert plan["visits"][action] == tried.get(action, 0)
        assert action not in worth or plan["q"][action] == pytest.approx(worth[action], abs=1e-9)
    if args.root == "gumbel" and args.planner == "mcts":
        assert plan["played"].tolist() == [action == chosen for action in range(NUM_ACTIONS)]
    else:
        assert torch.equal(plan["played"], plan["log_probs"].exp())


def compare(args, model, roots, simulations):
    trees = args.num_trees
    state = SimpleNamespace(args=args, device=CPU, times=None)
    torch.manual_seed(roots.seed)
    with mock.patch.multiple(hop, expand=model.expand, evaluate=model.evaluate):
        tree = hop.search(state, roots.node, None, None)
    names = [field.name for field in dataclasses.fields(reference.Settings) if field.name != "scale"]
    settings = {name: getattr(args, name) for name in names}
    settings = reference.Settings(**settings, scale=highest_payoff(model.config))
    plain = []
    depths = []
    repeated = 0
    for row, position in enumerate(model.positions(roots.node)):
        ended = bool(roots.ended[row])
        numbers = roots.uniform[:, row].tolist(), roots.gumbel[row].tolist()
        nodes = reference.search(settings, position, ended, model.network, model.step, *numbers)
        plain.append(nodes)
        assert_same_tree(row, by_tree(tree), nodes)
        count = sum(nodes[0].visits.values())
        expected = simulations if args.planner == "mcts" else len(nodes[0].visits)
        assert count == (0 if ended else expected)
        edges = sum(sum(node.visits.values()) for node in nodes.values())
        depths.append(edges / max(1, count))
        repeated += len(nodes) < count + 1
    plans = {name: x.flatten(0, 1) for name, x in hop.root_policy(args, tree).items()}
    for decision in range(len(plain) // trees):
        first = decision * trees
        verdict = reference.verdict(settings, plain[first : first + trees], roots.gumbel[first].tolist())
        logits = plain[first][0].said.logits
        assert_same_decision(args, {name: x[decision] for name, x in plans.items()}, logits, verdict)
    mean_depths = torch.tensor(depths).view(-1, trees).mean(1)
    torch.testing.assert_close(plans["search/depth"].double(), mean_depths.double())
    assert 0 < roots.ended.sum() < len(depths) / 2, "some games are over, most are not"
    if args.planner == "mcts":
        assert repeated > 5
        assert max(depths) > (1.4 if args.max_depth == 2 else 2.0)


BOARDS = {
    "4x4": StagHuntConfig(num_players=3, num_hares=3, final_time=7),
    "costly": StagHuntConfig(num_players=3, num_hares=3, final_time=7, stag_reward=-8.0, hare_reward=-0.5),
    "3x5": StagHuntConfig(height=3, width=5, num_players=2, num_stags=2, num_hares=2, final_time=6, max_wall_pieces=1),
}
ONE_STEP = {"planner": "one-step", "num_simulations": 2}  # however few these are, each legal action once
COMPARED = [  # root, board, max_depth, num_trees, simulations, other flags
    ("puct", "4x4", 32, 1, 18, {}),
    ("puct", "costly", 2, 3, 16, {"puct": 2.5, "gamma": 0.8}),
    ("puct", "3x5", 3, 1, 20, {"search_prior": 0.0, "q_temperature": 3.5}),
    ("gumbel", "4x4", 32, 1, 20, {"search_prior": 0.0}),
    ("gumbel", "3x5", 3, 1, 5, {"q_temperature": 10.0}),
    ("gumbel", "3x5", 32, 3, 16, {"q_temperature": 2.0}),
    ("puct", "4x4", 32, 3, NUM_ACTIONS, {**ONE_STEP, "search_prior": 0.6}),
    ("gumbel", "4x4", 32, 1, NUM_ACTIONS, ONE_STEP),
]


@pytest.mark.parametrize(("root", "board", "max_depth", "trees", "simulations", "flags"), COMPARED)
def test_trees_are_those_of_the_plain_search(root, board, max_depth, trees, simulations, flags):
    flags = {"root": root, "max_depth": max_depth, "num_trees": trees, "num_simulations": simulations, **flags}
    args = make_args(config=BOARDS[board], **{"gamma": 0.9, "q_temperature": 5.0, **flags})
    model = Model(args.config)
    roots = Roots(model, 84 // trees, trees, simulations, seed=simulations + max_depth)
    compare(args, model, roots, simulations)


def test_sequential_halving_of_all_sizes():
    for simulations in (*range(1, 40), 64, 100):
        table = hop.sequential_halving(simulations, CPU)
        assert table.dtype == torch.float32 and len(table) == NUM_ACTIONS + 1
        for considered in range(1, NUM_ACTIONS + 1):
            assert table[considered].tolist() == reference.schedule(considered, simulations)


def test_what_is_drawn_is_the_action_whose_stretch_holds_the_number():
    probs = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0, 0.0])
    uniform = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, 0.9999])
    for scale in (1, 2):  # probabilities need not add up to 1
        assert hop.draw(scale * probs.expand(6, 7), uniform).tolist() == [1, 1, 3, 3, 4, 4]


# ---- The models that a search plays with
RULES = {**PRETRAINING_CASES, "4x4": BOARDS["4x4"]}
RULES["short"] = StagHuntConfig(height=2, width=4, num_players=4, num_hares=2, final_time=9, steps_after_first_hunt=2)


@pytest.mark.parametrize("config", RULES.values(), ids=RULES)
def test_env_transition_is_the_game(config):
    """And where it ends, for each of those who look on"""
    generator = seeded(4)
    state = make_state(planner="none", subgoals="none", config=config, num_envs=60)
    env, games = state.env, state.games

    def by_seat(x):
        return x.transpose(0, 1)

    before = random_states(env, generator)
    actions = mixed_actions(env, before, random_kinds(env, generator), 0.3, generator)
    after, rewards, _, done = env.transition(before, actions)
    situation = {
        "board": by_seat(games.boards(before)),
        "clock": env.clock(before).expand(config.num_players, -1),
        "first_hunt": before.first_hunt.expand(config.num_players, -1),
    }
    joint = by_seat(env.seats_to_ego(actions))
    found = hop.imagined_step(state, situation, joint, "env")
    on = ~env.game_over(before)
    assert torch.equal(found["board"].byte()[:, on], by_seat(games.boards(after))[:, on])
    assert torch.equal(found["payoff"][:, on], by_seat(rewards)[:, on]) and torch.equal(found["last_joint"], joint)
    goes_on = by_seat(before.present) & on
    torch.testing.assert_close(found["clock"][goes_on], env.clock(after).expand_as(goes_on)[goes_on])
    assert torch.equal(found["ended"][goes_on], (done | ~by_seat(after.present))[goes_on])
    if config.steps_after_first_hunt is not None:
        assert torch.equal(found["first_hunt"][goes_on], after.first_hunt.expand_as(goes_on)[goes_on])
    assert not before.present.all() and (before.prey_alive & ~after.prey_alive).any()


def make_state(**changes):
    state = hop.TrainState(make_args(**changes), 0, CPU)
    with torch.no_grad():  # networks that say more than those that have learned nothing
        for network in state.networks.values():
            for p in network.params.values():
                noise = torch.randn(p.shape, generator=seeded(p.numel()))
                size = 0.3 if p.dim() == 2 or p.shape[2] in (1, 7) else 0.05
                p.add_(size * noise)
    return state


def play(state, num_steps, games=None):
    """-> steps [M, T, E, ...], of each call of plan_actions what it was given and what it found"""
    plan_actions = hop.plan_actions
    searches = []

    def keep(state, mind):
        plan, tree = plan_actions(state, mind)
        searches.append(SimpleNamespace(state=state, args=state.args, mind=dict(mind), plan=plan, tree=tree))
        return plan, tree

    shorter = copy.copy(state)
    shorter.args = dataclasses.replace(state.args, num_steps=num_steps)
    with mock.patch.object(hop, "plan_actions", keep):
        steps, _ = hop.rollout(shorter, games or state.games)
    return steps, searches


SEARCHED = {
    "world model": {},
    "env": {"search_model": "env", "num_trees": 3},
    "walls": {"config": StagHuntConfig(4, 5, 3, num_hares=2, max_wall_pieces=2, final_time=6)},
    "in the tree": {"infer_in_tree": True},
    "actions": {"subgoals": "actions"},
    "actions in the tree": {"subgoals": "actions", "infer_in_tree": True, "goal_kind": "discrete"},
    "no subgoals": {"subgoals": "none", "search_model": "env"},
    "hop": {**HOP, "num_trees": 3},
    "hop in the tree": {**HOP, "infer_in_tree": True},
}


def shape_reward(state, payoff, mind, joint, next_board):
    """With a bonus for a step to another cell"""
    return payoff + 9.0 * ((joint[..., 0] < STAY) & (next_board[..., 0] != mind["board"][..., 0]))


@torch.no_grad()
def check_node(search, number):
    """Node `number` of all trees: the step that led there, and what the networks say of it. -> how many trees have it,
    in how many of them the game ends there"""
    state, args, tree = search.state, search.args, search.tree
    root = {name: x.repeat_interleave(args.num_trees, 1) for name, x in search.mind.items() if name != "posterior"}
    node = {name: x[:, :, number] for name, x in tree.nodes.items()}
    situation = {name: node[name] for name in hop.SITUATION}
    posterior = None
    if not args.infer_in_tree:
        posterior = search.mind["posterior"].unflatten(1, (-1, search.mind["history"].shape[2]))
        posterior = posterior.repeat_interleave(args.num_trees, 1).flatten(1, 2)
    known = torch.ones_like(node["ended"])
    if number > 0:
        known, edge = (tree.child[:, :, :-1] == number).flatten(2).max(2)
        parent = edge // NUM_ACTIONS
        rows = torch.arange(len(known))[:, None], torch.arange(known.shape[1])
        before = {name: x[(*rows, parent)] for name, x in tree.nodes.items()}
        joint = node["last_joint"]
        assert torch.equal(joint[..., 0][known], (edge % NUM_ACTIONS)[known])
        drawn = before["others_probs"].gather(3, joint[..., 1:, None].long())
        assert (drawn[known] > 0).all(), "MOA expects it"
        new = hop.imagined_step(state, before, joint, args.search_model)
        new["reward"] = shape_reward(state, new["payoff"], before, joint, new["board"])
        for name in ("board", "clock", "first_hunt", "reward", "ended"):
            assert torch.equal(node[name][known], new[name][known].to(node[name].dtype)), name
        assert (node["value"][known & node["ended"]] == 0).all(), "nothing is earned after an end"
        if args.infer_in_tree:
            past = {name: before[name] for name in hop.SITUATION}
            history = hop.update_history(state, hop.perceive(state, past), joint, torch.zeros_like(known))
            torch.testing.assert_close(node["history"][known], history[known])
    else:
        assert torch.equal(node["ended"], node["board"][..., 0] == args.config.num_cells)
        for name in hop.SITUATION if args.infer_in_tree else hop.SITUATION[:-1]:  # the last is the history
            assert torch.equal(node[name], root[name]), name

    mind = hop.decide(state, hop.perceive(state, situation, posterior))
    if args.subgoals == "inferred" and not args.infer_in_tree:
        assert torch.equal(mind["goals"], root["goals"]), "as inferred at the root"
    torch.testing.assert_close(node["log_probs"][known], mind["log_probs"][known])
    goes_on = known & ~node["ended"]
    torch.testing.assert_close(node["value"][goes_on], mind["value"][goes_on])
    others = node["others_probs"]
    others_legal = mind["others_legal"].view(others.shape)
    assert not (others * ~others_legal)[known].any(), "co-players do what they may"
    torch.testing.assert_close(others[known].sum(2), torch.ones_like(others[known][..., 0]))
    if args.subgoals == "actions":
        torch.testing.assert_close(others.flatten(2)[known], mind["goals"][known])
    return int(known.sum()), int((known & node["ended"]).sum())


@pytest.mark.parametrize("changes", SEARCHED.values(), ids=SEARCHED)
def test_every_node_holds_what_rules_and_networks_say(changes, monkeypatch):
    """Along every edge: the next board and reward, with a bonus, the end, the history; legal actions, policy, value"""
    monkeypatch.setattr(hop, "shape_reward", shape_reward)
    _, searches = play(make_state(num_envs=4, **changes), 3)
    nodes = range(searches[0].tree.visits.shape[2] - 1)
    checked = [check_node(search, number) for search in searches[1:] for number in nodes]
    steps, ends = np.sum(checked, 0)
    assert steps > 100 and ends > 5, "trees grew, and into the end of games"


@pytest.mark.parametrize("changes", [{}, {"goal_kind": "discrete", "goal_dim": 3}, {"infer_in_tree": True}, HOP])
@torch.no_grad()
def test_each_co_player_pursues_its_own_subgoal(changes):
    """In each tree another one, drawn from what was inferred of that co-player, and independently of the other's"""
    state = make_state(num_envs=3, search_model="env", **changes)
    _, searches = play(state, 3)
    mind, moa, read = searches[-1].mind, state.networks["moa"], []
    state.networks["moa"] = lambda *inputs: (read.append(inputs[2]), moa(*inputs))[1]
    state.args = dataclasses.replace(state.args, num_trees=1000, num_simulations=1)
    hop.plan_actions(state, mind)
    goal = next(x for x in read if x.shape[1] == 3 * 1000 * 2)  # of the root
    goal = goal.unflatten(1, (3, 1000, 2))
    posterior = mind["posterior"].unflatten(1, (3, 2))
    mean = hop.goal_mean(state.args, posterior)
    std = (mean * (1 - mean)).sqrt()  # of categories
    if state.args.goal_kind == "continuous":
        std = (0.5 * posterior.chunk(2, 3)[1]).exp()
    assert (mean[:, :, 0] - mean[:, :, 1]).abs().amax() > 0.1
    assert ((goal.mean(2) - mean).abs() <= 0.15 * std).all()
    torch.testing.assert_close(goal.std(2), std, atol=0.02, rtol=0.15)
    one, other = ((goal - mean[:, :, None]) / std[:, :, None].clamp(min=1e-3)).unbind(3)
    assert ((one * other).mean(2).abs() < 0.2).all()


# ---- HOP's belief: stag or hare, by Bayes' rule
@torch.no_grad()
def likelihoods(state, steps, t):
    """Of step t -> MOA's log-probabilities of each co-player's actions, goal by goal [M, n, K, 2, 7]; who is on the
    board [M, n, K]"""
    _, seen, legal = hop.views(state.env, steps["board"][:, t])
    clock = steps["clock"][:, t].repeat_interleave(2, 1)
    said = []
    for goal in torch.eye(2):
        said.append(state.networks["moa"](seen, clock, goal.expand(*clock.shape, 2), legal))
    present = steps["board"][:, t, :, 1:3] < state.args.config.num_cells
    return torch.stack(said, 2).unflatten(1, (-1, 2)), present


def who_left(steps):
    """bool [M, T, E, N]: who left the board with the step"""
    gone = TINY_CONFIG.num_cells
    return (steps["board"][..., :3] < gone) & (steps["next_board"][..., :3] == gone)


@pytest.mark.parametrize("discount", [0.7, 0.0])
def test_belief_in_stag_or_hare_by_hand(discount, monkeypatch):
    """Bayes' rule. The prior is b0 = alpha b0 + (1 - alpha) 1[goal], by what the co-player was seen to take, from 1/2
    on; no action is taken for impossible."""
    flags = {"num_envs": 5, "memory_discount": discount, "history_reset_prob": 0.0, "planner": "none"}
    state = make_state(**HOP, **flags, seats="learner,learner,nearest_stag")
    state.networks["moa"].params["encoder.table"].data.mul_(30)  # so that some action is as good as impossible
    perceive = hop.perceive
    minds = []
    monkeypatch.setattr(hop, "perceive", lambda *given: (minds.append(perceive(*given)), minds[-1])[1])
    evidence = np.zeros((2, 5, 2, 2))  # [M, E, K, goal]
    prior = np.full((2, 5, 2, 2), 0.5)
    seen = {"left": 0, "clamped": 0, "ends": 0, "stag": 0, "hare": 0, "nothing": 0}
    for _ in range(40):
        kept = torch.tensor(np.concatenate([evidence, prior - 0.5], 3)).float()
        torch.testing.assert_close(state.games.history, kept, atol=1e-3, rtol=1e-4)
        minds.clear()
        steps, _ = play(state, 1)
        weights = prior.clip(1e-6) * np.exp(evidence - evidence.max(3, keepdims=True))
        expected = torch.tensor(weights / weights.sum(3, keepdims=True)).float()
        believed = minds[0]["posterior"].exp().view(2, 5, 2, 2)  # before the step
        torch.testing.assert_close(believed, expected, atol=1e-4, rtol=0)
        assert steps["goals"].shape[3] == 0, "the policy reads none of it"
        acts, present = likelihoods(state, steps, 0)
        left = who_left(steps)[:, 0]
        for place in np.ndindex(2, 5, 2):
            m, e, k = place
            action = int(steps["joint"][m, 0, e, 1 + k])
            has_left = bool(left[m, e, 1 + k])
            if present[m, e, k]:
                scores = acts[m, e, k, :, action].numpy()
                clamped = np.maximum(scores, -10.0)
                evidence[place] += clamped - clamped.max()
                seen["clamped"] += scores.min() < -10
            else:
                seen["left"] += 1
            if has_left:
                goal = {HUNT_STAG: 0, HUNT_HARE: 1}[action]
                prior[place] = discount * prior[place] + (1 - discount) * np.eye(2)[goal]
                seen[("stag", "hare")[goal]] += 1
            if steps["done"][m, 0, e]:
                evidence[place] = 0
                prior[place] = 0.5 if discount == 0 else prior[place]
                seen["nothing"] += bool(present[m, e, k]) and not has_left
                seen["ends"] += 1
    assert all(count > 2 for count in seen.values()), seen


def test_hop_learns_from_the_prey_that_was_taken():
    """In these steps or in those ahead, of which MOA learns nothing else. Each co-player's game weighs the same."""
    length, ahead = 9, 4
    flags = {"num_envs": 24, "planner": "none", "num_steps": length}
    state = make_state(**HOP, **flags, seats="learner,mixed,nearest_stag")
    steps, _ = play(state, length + ahead)
    with torch.no_grad(), mock.patch.object(hop, "sample_replays", lambda *_, **__: as_windows(steps)):
        losses = hop.opponent_losses(state)
    said = [likelihoods(state, steps, t) for t in range(length)]
    left, done = who_left(steps)[0], steps["done"][0]
    means = []
    seen = {"stag": 0, "hare": 0, "unknown": 0, "left": 0, "taken ahead": 0}
    for e, k in np.ndindex(24, 2):
        actions = steps["joint"][0, :, e, 1 + k].tolist()
        ends = [t for t in range(length + ahead) if done[t, e] or t == length + ahead - 1]
        for first, last in itertools.pairwise([-1, *ends]):
            taken_at = [t for t in range(first + 1, last + 1) if left[t, e, 1 + k]]
            there = [t for t in range(first + 1, min(last + 1, length)) if said[t][1][0, e, k]]
            if not taken_at or not there:
                seen["unknown"] += 1
                continue
            goal = {HUNT_STAG: 0, HUNT_HARE: 1}[actions[taken_at[0]]]
            seen[("stag", "hare")[goal]] += 1
            seen["left"] += last > taken_at[0]
            seen["taken ahead"] += taken_at[0] >= length
            means.append(np.mean([-float(said[t][0][0, e, k, goal, actions[t]]) for t in there]))
    assert all(count > 2 for count in seen.values()), seen
    assert losses["losses/moa"].item() == pytest.approx(np.mean(means), rel=1e-4)
    assert torch.equal(losses["losses/moa"], losses["losses/opponent_models"])


# ---- The loop
@pytest.mark.parametrize(
    "changes", [{}, {"root": "gumbel", "num_trees": 1}, {**HOP, "seats": "learner,random,learner"}]
)
def test_learners_play_what_they_searched(changes):
    state = make_state(num_envs=8, **changes)
    steps, searches = play(state, 8)
    assert len(searches) == 8
    for t, search in enumerate(searches):
        plan = search.plan
        now = {name: x[:, t] for name, x in steps.items()}
        legal, action = now["legal"], now["action"]
        for name in ("log_probs", "search/gain", "search/kl", "search/depth"):
            assert torch.equal(now[name], plan[name]), name
        torch.testing.assert_close(now["log_prob"], plan["log_probs"].gather(2, action)[..., 0])
        for name in ("board", "clock", "first_hunt", "last_joint"):
            assert torch.equal(search.mind[name], now[name].to(search.mind[name].dtype)), name
        assert (plan["played"].gather(2, action) > 0).all()
        assert not (plan["played"] * ~legal).any() and not (plan["visits"] * ~legal).any(), "legal actions only"
        assert not (plan["log_probs"].exp() * ~legal).any()
        _, value = state.networks["policy"](*(now[name] for name in hop.POLICY_READS))
        torch.testing.assert_close(now["value"], value)


def test_nobody_searches_who_only_watches_or_has_no_planner():
    watched, alone = make_state(), make_state(planner="none")
    for state, games in ((watched, watched.watched), (alone, alone.games)):
        steps, searches = play(state, 3, games)
        assert not searches and not any(name.startswith("search/") for name in steps)


def policy_gradient(state, batch, **changes):
    """-> of the loss, by the actor's weights; the policy loss"""
    policy = state.networks["policy"]
    loss, metrics = hop.ppo_loss(dataclasses.replace(state.args, **changes), policy, batch)
    (gradient,) = torch.autograd.grad(loss.sum(), [policy.params["actor.weight"]])
    return gradient, metrics["losses/policy_loss"].detach()


def test_the_policy_learns_what_the_search_found():
    """And nothing of what PPO would read, even where the action was one that the search hardly ever plays"""
    state = make_state(num_envs=16)
    batch, _ = hop.make_ppo_batch(state.args, play(state, 8)[0], real=True)
    gradient, loss = policy_gradient(state, batch)
    with torch.no_grad():
        log_probs, _ = state.networks["policy"](*(batch[name] for name in hop.POLICY_READS))
    cross_entropy = -(batch["log_probs"].exp() * log_probs.clamp(min=-50)).sum(2)
    torch.testing.assert_close(loss, (cross_entropy * batch["weight"]).sum(1) / batch["weight"].sum(1))
    nonsense = {
        "advantage": -batch["advantage"] + 100,
        "action": torch.zeros_like(batch["action"]),
        "log_prob": torch.full_like(batch["log_prob"], -200.0),
    }
    other, _ = policy_gradient(state, batch | nonsense)
    assert torch.equal(other, gradient) and gradient.isfinite().all()
    without_entropy, _ = policy_gradient(state, batch, ent_coef=0.0)
    assert (gradient != without_entropy).flatten(1).any(1).all(), "entropy is rewarded"
    by_ppo, _ = policy_gradient(state, batch, policy_loss="ppo")
    flipped, _ = policy_gradient(state, batch | {"advantage": -batch["advantage"]}, policy_loss="ppo")
    assert (by_ppo != flipped).flatten(1).any(1).all(), "--policy-loss ppo"


def test_imagined_samples_are_never_distilled():
    state = make_state(imagination=True, ppo_real_ratio=0.2, wm_updates=0, subgoal_updates=0)
    hop.make_stages(state)["watch"]()
    with mock.patch.object(hop, "ppo_update", return_value={}) as ppo_update:
        hop.train_iteration(state)
    _, batch = ppo_update.call_args.args
    real = batch["real"]
    assert (batch["weight"][~real] > 0).any() and batch["weight"][real].any()
    gradient, _ = policy_gradient(state, batch)
    for changes, moves_the_actor in ((~real, True), (real, False)):
        advantage = torch.where(changes, -batch["advantage"], batch["advantage"])
        other, _ = policy_gradient(state, batch | {"advantage": advantage})
        assert bool((gradient != other).any()) == moves_the_actor
