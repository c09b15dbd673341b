"""Tiny experiments of hopplus_ppo.py, and what they saw and did"""

import math

import torch
from helpers import TINY_FLAGS

import hopplus_ppo as hop
from stag_hunt_env import copy_state, seats_table

CPU = torch.device("cpu")


def make_args(method="hopplus", **changes):
    return hop.make_args(method, "cpu", **{**TINY_FLAGS, **changes})


def make_state(method="hopplus", watch=False, **changes):
    args = make_args(method, **changes)
    seeds = list(range(args.seed, args.seed + args.num_seeds))
    table = seats_table(args.seats, args.config.num_players)
    return hop.make_train_state(args, [table] * len(seeds), seeds, CPU, watch=watch)


def play(state, num_steps):
    return hop.rollout(state.args, state.env, state.seats, state.networks, state.rollout_state, num_steps)


def one_step(transitions, t):
    """[M, T, E, ...] -> [M, E, ...]"""
    return hop.Transitions(*(x[:, t] for x in transitions))


@torch.no_grad()
def infer(state, steps, history):
    return hop.infer_opponents(
        state.args, state.env, state.networks, steps.board, steps.prey_position, history, steps.oracle_id
    )


def read_inputs(config, inputs):
    """What a policy read, taken apart again: board, clock, last joint action, subgoals"""
    n, planes = config.num_players, math.prod(config.observation_shape)
    goals = (n - 1) * TINY_FLAGS["goal_dim"]
    used = planes + 1 + 7 * n + goals
    assert inputs.shape[-1] == used + -used % 8 and (inputs[..., :-used] == 0).all()
    board, clock, acts, goals = inputs[..., -used:].split([planes, 1, 7 * n, goals], -1)
    board, acts = board.unflatten(-1, config.observation_shape).byte(), acts.unflatten(-1, (n, 7))
    assert (acts.sum(-1) == 1).all()
    return {"board": board, "clock": clock[..., 0], "last_joint": acts.argmax(-1), "goals": goals}


def recorded(state, function):
    """What function() returns, and what the game saw: [(state before, actions, reward, done, players)], by seat"""
    log, step = [], state.env.step

    def watched(actions):
        before, kinds = copy_state(state.env.state), state.seats.kinds.clone()
        results = step(actions)
        log.append((before, actions.clone(), results[1].clone(), results[3].clone(), kinds))
        return results

    state.env.step = watched
    try:
        return function(), log
    finally:
        del state.env.step
