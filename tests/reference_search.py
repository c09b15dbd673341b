"""The tree search once more, one tree at a time in plain Python: what the batched search is compared with.

Written from the formulas (Danihelka et al., "Policy improvement by planning with Gumbel", 2022), not from
hopplus_mcts.py. A tree is a dictionary of nodes: 0 is the root, and simulation k adds node k + 1, if it adds one.
"""

import dataclasses
import math
from itertools import accumulate


@dataclasses.dataclass
class Settings:
    root: str  # puct or gumbel
    planner: str = "mcts"  # or one-step
    puct: float = 1.0
    scale: float = 1.0  # Q / scale is what is compared with priors and multiplied by beta
    gamma: float = 0.99
    q_temperature: float = 50.0
    search_prior: float = 1.0
    max_depth: int = 32


@dataclasses.dataclass
class Said:
    """What the networks say about a position"""

    logits: dict[int, float]  # log-probabilities of the legal actions
    value: float
    expected: list[list[float]]  # of each co-player's actions


@dataclasses.dataclass
class Node:
    position: object
    said: Said
    value: float
    reward: float = 0.0  # on the way here
    ended: bool = False
    joint: tuple[int, ...] = ()  # and what everybody did
    visits: dict[int, int] = dataclasses.field(default_factory=dict)
    total: dict[int, float] = dataclasses.field(default_factory=dict)
    child: dict[int, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        self.visits = dict.fromkeys(self.said.logits, 0)
        self.total = dict.fromkeys(self.said.logits, 0.0)

    def q(self, action):
        return self.total[action] / self.visits[action]

    def tried(self):
        return [action for action, count in self.visits.items() if count]


def highest(scores):
    """The action with the highest score; of several, the first"""
    return max(sorted(scores), key=lambda action: scores[action])


def softmax(scores):
    top = max(scores.values())
    weights = {action: math.exp(score - top) for action, score in scores.items()}
    return {action: weight / sum(weights.values()) for action, weight in weights.items()}


def drawn(probabilities, number):
    """The action whose stretch of [0, 1) holds the number"""
    ends = list(accumulate(probabilities))
    return next(action for action, end in enumerate(ends) if number * ends[-1] < end)


def completed(node):
    """Q of each action; that of one that was not tried is estimated from the node's value and from those that were"""
    tried, count = node.tried(), sum(node.visits.values())
    guess = node.value
    if tried:
        weight = {action: math.exp(node.said.logits[action]) for action in tried}
        of_tried = sum(weight[action] * node.q(action) for action in tried) / sum(weight.values())
        guess = (node.value + count * of_tried) / (1 + count)
    return {action: node.q(action) if action in tried else guess for action in node.visits}


def sigma(settings, most_visits, q):
    return settings.q_temperature * (1 + most_visits / 50) * q / settings.scale


def schedule(considered, simulations):
    """How often the action has been visited that is due in each simulation: all of those considered get equally many
    visits, then the better half of them, and so on down to two; every phase has the same share of the simulations"""
    if considered < 2:
        return list(range(simulations))
    phases, left, visited, due = math.ceil(math.log2(considered)), considered, 0, []
    while len(due) < simulations:
        each = max(1, simulations // (phases * left))
        for more in range(each):
            due += [visited + more] * left
        visited, left = visited + each, max(2, left // 2)
    return due[:simulations]


def by_puct(settings, node):
    count = sum(node.visits.values())
    scores = {}
    for action, logit in node.said.logits.items():
        q = node.q(action) if node.visits[action] else node.value
        bonus = settings.puct * math.exp(logit) * math.sqrt(max(1, count)) / (1 + node.visits[action])
        scores[action] = q / settings.scale + bonus
    return highest(scores)


def by_improved_policy(settings, node):
    most, count, q = max(node.visits.values()), sum(node.visits.values()), completed(node)
    policy = softmax({action: logit + sigma(settings, most, q[action]) for action, logit in node.said.logits.items()})
    return highest({action: policy[action] - node.visits[action] / (1 + count) for action in policy})


def by_halving(settings, node, gumbel, due):
    most, q = max(node.visits.values()), completed(node)
    candidates = [action for action, count in node.visits.items() if count == due]
    return highest({a: gumbel[a] + node.said.logits[a] + sigma(settings, most, q[a]) for a in candidates})


def search(settings, position, ended, network, step, uniform, gumbel):
    """network(position) -> Said; step(position, joint action) -> position, reward, ended; uniform
    [simulations][co-player]; gumbel [action] -> {number: Node}"""
    said = network(position)
    tree = {0: Node(position, said, said.value, ended=ended)}
    due = schedule(len(said.logits), len(uniform))

    def expand(node, action, k):
        others = [drawn(probabilities, u) for probabilities, u in zip(node.said.expected, uniform[k], strict=True)]
        joint = (action, *others)
        after, reward, over = step(node.position, joint)
        said = network(after)
        tree[k + 1] = Node(after, said, 0.0 if over else said.value, reward, over, joint)
        node.child[action] = k + 1

    def choose(node, depth, k):
        if settings.root == "puct":
            return by_puct(settings, node)
        return by_halving(settings, node, gumbel, due[k]) if depth == 0 else by_improved_policy(settings, node)

    def take(node, action, depth, k):
        """The return of the action, counted at the node"""
        if action not in node.child:
            expand(node, action, k)
            child = tree[k + 1]
            ahead = child.value
        else:
            child = tree[node.child[action]]
            ahead = walk(child, depth + 1, k)
        found = child.reward + settings.gamma * ahead
        node.visits[action] += 1
        node.total[action] += found
        return found

    def walk(node, depth, k):
        if node.ended or depth == settings.max_depth:
            return node.value
        return take(node, choose(node, depth, k), depth, k)

    if settings.planner == "one-step":
        for action in [] if ended else said.logits:
            take(tree[0], action, 0, action)
    else:
        for k in range(len(uniform)):
            walk(tree[0], 0, k)
    return tree


def verdict(settings, trees, gumbel):
    """The trees of one decision -> improved policy, visits, Q, the action that the Gumbel root plays, each by action"""
    roots = [tree[0] for tree in trees]
    logits = roots[0].said.logits
    q = {action: sum(completed(root)[action] for root in roots) / len(roots) for action in logits}
    visits = {action: sum(root.visits[action] for root in roots) for action in logits}
    most = max(visits.values())
    if settings.root == "gumbel":
        scores = {action: logits[action] + sigma(settings, most / len(roots), q[action]) for action in logits}
    else:
        beta = settings.q_temperature / settings.scale
        scores = {action: settings.search_prior * logits[action] + beta * q[action] for action in logits}
    improved = softmax(logits) if roots[0].ended else softmax(scores)
    finalists = [action for action in logits if visits[action] == most or len(roots) > 1]
    return improved, visits, q, highest({action: gumbel[action] + scores[action] for action in finalists})
