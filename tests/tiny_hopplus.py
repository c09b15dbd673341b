"""Tiny experiments of hopplus_ppo.py, and what they saw and did"""

import copy
import dataclasses

import hopplus_mcts
import hopplus_ppo as hop
from stag_hunt_env import State

import torch
from helpers import tiny_args as make_args

CPU = torch.device("cpu")


def make_state(method="hopplus", **changes):
    return hop.TrainState(make_args(method, **changes), 0, CPU)


def make_watched(method="hopplus", **changes):
    """As in preparation: rule-based players play, one learner per seed looks on"""
    args = make_args(method, share_parameters=True, **changes)
    return hop.TrainState(args, 0, CPU, pretraining=True)


def play(state, num_steps, games=None):
    """-> steps [M, T, E, ...], sums over the games that ended"""
    shorter = copy.copy(state)
    shorter.args = dataclasses.replace(state.args, num_steps=num_steps)
    return hop.rollout(shorter, games or state.games)


def train(state):
    """One iteration that trains everything -> its samples, its metrics [M] or [S, N]"""
    if state.watched is not None and not state.watched.replay:
        state.watched.push(hop.rollout(state, state.watched)[0])
    for x in state.sums.values():
        x.zero_()
    samples = hop.train_iteration(state)
    metrics = {name: torch.as_tensor(x) for name, x in hop.read_metrics(state).items()}
    return samples, metrics


def one_step(steps, t):
    """[M, T, E, ...] -> [M, E, ...]"""
    return {name: x[:, t] for name, x in steps.items()}


@torch.no_grad()
def infer(state, steps, history=None):
    """What learners make of steps [M, n, ...], with another history if one is given"""
    situation = {name: steps[name] for name in hop.SITUATION}
    situation["history"] = (steps["history"] if history is None else history).float()
    return hop.perceive(state, situation)


def as_windows(steps):
    """What a rollout left, as Games.sample draws it"""
    done = steps["done"]
    number = done.cumsum(1) - done.long()
    return {name: steps[name] for name in hop.REPLAYED} | {"game_number": number}


def encode(state, windows):
    """Histories [M, T, G, K, 2 * hidden] before each step of windows [M, T, G, ...], from that of the first step on"""
    _, seen, _ = hop.views(state.env, windows["board"].flatten(1, 2))
    return hop.encode_history(state, windows, seen)[1]


def on_board(config, cells):
    """bool [...]: these cells are on the board"""
    return cells < config.num_cells


def co_players_there(windows, config):
    """bool [..., K]: which co-players are on the board"""
    return on_board(config, windows["board"][..., 1 : config.num_players])


class TrueWorld:
    """The rules in the place of the world model. `change` makes something else of (board, payoff) in call number
    `len(said)`."""

    def __init__(self, state, change=lambda board, payoff, call: (board, payoff)):
        self.games, self.change, self.said = state.games, change, []
        self.network = state.networks["world"].network

    def __call__(self, board, joint, next_board=None, payoff=None, method="predict"):
        new, paid = hopplus_mcts.env_transition(self.games, board.byte(), joint.long())
        new = new.byte()
        if method == "loss":
            return ((new != next_board).any(2) | ((paid - payoff).abs() > 1e-6)).float()
        new, paid = self.change(new, paid, len(self.said))
        self.said.append(new)
        return new, paid


def enlarge_moa(state, factor=100.0):
    """Untrained, it says the same whatever it reads: its head begins with tiny weights."""
    state.networks["moa"].params["head.4.weight"].data.mul_(factor)


def recorded(state, function, games=None):
    """What function() returns, and what the game saw: [(state before, actions, reward, done, players)], by seat"""
    games = games or state.games
    env, seats = games.env, games.seats
    log, advance = [], env.advance

    def watched(actions):
        before, kinds = State(*(x.clone() for x in env.state)), seats.kinds.clone()
        reward, present_before, done = advance(actions)
        log.append((before, actions.clone(), reward.clone(), done.clone(), kinds))
        return reward, present_before, done

    env.advance = watched
    try:
        return function(), log
    finally:
        del env.advance
