"""Between the batched tensors and the plain-Python game, tiny runs, and a chi-square test."""

import copy
import dataclasses
import json
import re
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import hopplus_mcts
import hopplus_ppo
from stag_hunt_env import PLAYER_PROBS, POPULATION, STAY, StagHuntConfig, State, sample

import numpy as np
import pytest
import reference_game as reference
import torch


def games_of(state):
    """State of B games -> B plain-Python games"""
    fields = [x.tolist() for x in state]
    return [
        reference.Game(
            position, present, prey, alive, {cell for cell, wall in enumerate(walls) if wall}, time, first_hunt
        )
        for position, present, prey, alive, walls, time, first_hunt in zip(*fields, strict=True)
    ]


def state_of(config, games):
    walls = [[cell in g.walls for cell in range(config.num_cells)] for g in games]
    columns = (
        ([g.position for g in games], np.int32),
        ([g.present for g in games], np.bool_),
        ([g.prey for g in games], np.int32),
        ([g.alive for g in games], np.bool_),
        (walls, np.uint8),
        ([g.time for g in games], np.int32),
        ([g.first_hunt for g in games], np.int32),
    )
    return State(*(torch.from_numpy(np.array(values, dtype)) for values, dtype in columns))


def planes_of(config, games):
    planes = np.frombuffer(bytearray(b"".join(reference.observe(config, g) for g in games)), np.uint8)
    return torch.from_numpy(planes.reshape(len(games), config.num_players, *config.observation_shape))


def legal_of(config, games):
    legal = np.zeros((len(games), config.num_players, 7), np.bool_)
    for b, game in enumerate(games):
        for seat in range(config.num_players):
            legal[b, seat, list(reference.legal_actions(config, game, seat))] = True
    return torch.from_numpy(legal)


def assert_same(name, ours, expected):
    assert ours.dtype == expected.dtype, f"{name}: dtype {ours.dtype}, not {expected.dtype}"
    assert torch.equal(ours, expected), f"{name}:\n{ours}\nexpected:\n{expected}"


def assert_same_state(ours, expected):
    for name in State._fields:
        assert_same(name, getattr(ours, name), getattr(expected, name))


def seat_probs(env, state, kinds):
    """[B, N, 7] when seat (b, i) is played by number kinds[b, i] of POPULATION"""
    legal = env.legal_actions(state)
    table = torch.stack([PLAYER_PROBS[name](env, state, legal) for name in POPULATION], 2)
    return table.gather(2, kinds[..., None, None].expand(-1, -1, 1, 7)).squeeze(2)


def mixed_actions(env, state, kinds, wild, generator):
    """Each seat plays its kind of rule-based player, but a share `wild` of actions is any of the 7, legal or not."""
    actions = sample(seat_probs(env, state, kinds), generator)
    anything = torch.randint(7, actions.shape, generator=generator)
    return torch.where(torch.rand(actions.shape, generator=generator) < wild, anything, actions)


def random_kinds(env, generator):
    return torch.randint(len(POPULATION), (env.num_envs, env.config.num_players), generator=generator)


def chi_square_p(counts, expected=None):
    """p of `counts` (last axis) under `expected` frequencies (default: all equal)"""
    counts = torch.as_tensor(counts, dtype=torch.float64)
    expected = torch.ones_like(counts) if expected is None else torch.as_tensor(expected, dtype=torch.float64)
    expected = expected / expected.sum() * counts.sum()
    assert (expected >= 5).all(), "too few counts for a chi-square test"
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((counts.numel() - 1) / 2.0).double(), statistic / 2))


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def stir_global_generator(seed):
    """Which the game must neither read nor touch -> its state"""
    torch.manual_seed(seed)
    torch.rand(5)
    return torch.get_rng_state().tolist()


PRETRAINING_CASES = {  # square and not, 2 to 6 players, walls, everything that changes rewards
    "default": StagHuntConfig(),
    "two players": StagHuntConfig(height=3, width=5, num_players=2, num_hares=2, final_time=10),
    "walls": StagHuntConfig(
        height=5, width=6, num_players=3, num_stags=2, num_hares=3, max_wall_pieces=3, final_time=14
    ),
    "six players": StagHuntConfig(5, 4, num_players=6, num_stags=2, num_hares=3, final_time=12),
    "two rows": StagHuntConfig(height=2, width=7, num_players=3, num_hares=2, final_time=9),
}


def replay(config, games):
    """Plays stored games again by the plain-Python rules; yields (number, t, game before, actions, rewards, acted,
    done, game after)."""
    start = State(*(x[:, 0] for x in games.states))
    for number, (game, played) in enumerate(zip(games_of(start), games.actions.tolist(), strict=True)):
        for t, actions in enumerate(played):
            before = copy.deepcopy(game)
            rewards, acted, done = reference.step(config, game, actions)
            yield number, t, before, actions, rewards, acted, done, copy.deepcopy(game)


def record_games(env, play, *args):
    """What play(env, *args) returns, and the states [G, T + 1, ...] and actions [G, T, N] behind it, for `replay`"""
    seen, transition = [], env.transition

    def watched(state, actions):
        after, reward, acted, done = transition(state, actions)
        seen.append((state, torch.where(acted, actions, 4), after))
        return after, reward, acted, done

    env.transition = watched
    played = play(env, *args)
    env.transition = transition
    before, actions, after = zip(*seen, strict=True)
    states = State(*(torch.stack(field, 1) for field in zip(*before, after[-1], strict=True)))
    return played, SimpleNamespace(states=states, actions=torch.stack(actions, 1))


def record_learning_rates(monkeypatch):
    """-> a list to which each optimiser that makes a step adds a list of the learning rates of its steps"""
    found = []
    of_optimizer = {}

    def recorded(step, rate):
        def record(optimizer, *given, **named):
            if optimizer not in of_optimizer:
                of_optimizer[optimizer] = []
                found.append(of_optimizer[optimizer])
            of_optimizer[optimizer].append(float(rate(optimizer)))
            return step(optimizer, *given, **named)

        return record

    step = recorded(torch.optim.Adam.step, lambda optimizer: optimizer.param_groups[0]["lr"])
    monkeypatch.setattr(torch.optim.Adam, "step", step)
    for script in (hopplus_ppo, hopplus_mcts):
        step = recorded(script.Adam.step, lambda optimizer: optimizer.learning_rate)
        monkeypatch.setattr(script.Adam, "step", step)
    return found


def tiny_args(method="hopplus", script=hopplus_ppo, **changes):
    """Flags of a run of a second"""
    return dataclasses.replace(script.default_args(method, "cpu"), **{**TINY_FLAGS, **changes})


def train_tiny(run_dir, method="hopplus", script=hopplus_ppo, **changes):
    """Trains -> the folders of all seeds"""
    before = {*Path(run_dir).glob("*")}
    script.main(tiny_args(method, script, **changes, run_dir=str(run_dir)))
    return sorted({*Path(run_dir).glob("*")} - before)


def untrained(folder, method="ppo", script=hopplus_ppo, stays=None, **changes):
    """A run of learners that act at random, or, where `stays` [M], do nothing but stay -> its folder"""
    args = tiny_args(method, script, **changes)
    state = script.TrainState(args, 0, torch.device("cpu"))
    if stays is not None:
        policy = state.networks["policy"].params
        for p in policy.values():
            p.data.zero_()
        policy["actor.bias"].data[:, STAY] = 100.0 * torch.tensor(stays)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    progress = {"args": dataclasses.asdict(args), "iteration": 0, "seconds": 0.0}
    script.save_checkpoint(folder / "checkpoint.pt", 0, state, progress | {"folders": [folder.name]})
    return folder


def start_script(script, *words):
    """What the script does when it is started with these words"""
    entry = Path(script.__file__).read_text().split('\nif __name__ == "__main__":\n')[1]
    with mock.patch.object(sys, "argv", [f"{script.__name__}.py", *map(str, words)]):
        exec(textwrap.dedent(entry), vars(script) | {"__name__": "__main__"})


def refused(capsys, function, *given, code=1, **named):
    """-> the one line that says why"""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        function(*given, **named)
    assert stop.value.code == code
    (line,) = re.findall(r"error: [^\r\n]*", capsys.readouterr().err)  # beside a progress bar
    return line


def resume(script, path, **changes):
    """As --resume, with flags that may be given anew"""
    saved = script.load_checkpoint(str(path), script.FORMAT)["args"]
    saved |= {"config": StagHuntConfig(**saved["config"]), "resume": str(path), **changes}
    script.main(script.Args(**saved))


class Recorded:
    """A network that keeps what it is asked: `seen`, (method, inputs) each time"""

    def __init__(self, network):
        self.network, self.params, self.seen = network, network.params, []

    def __call__(self, *inputs, method="forward"):
        self.seen.append((method, inputs))
        return self.network(*inputs, method=method)


TINY_CONFIG = StagHuntConfig(height=3, width=4, num_players=3, num_hares=3, final_time=6)


def lines_of(folder):
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def without_times(lines):
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines]


def same_tree(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_tree(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same_tree(x, y) for x, y in zip(a, b, strict=True))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else np.array_equal(a, b)


TINY_FLAGS = {  # for runs of a second
    "config": TINY_CONFIG,
    "num_envs": 4,
    "num_steps": 8,
    "total_timesteps": 64,
    "log_every": 1,
    "policy_hidden": 8,
    "update_epochs": 2,
    "num_minibatches": 2,
    "subgoal_hidden": 8,
    "goal_dim": 4,
    "subgoal_updates": 2,
    "subgoal_batch_size": 4,
    "wm_hidden": 16,
    "wm_batch_size": 16,
    "replay_rollouts": 2,
    "pretraining_updates": 2,
    "pretraining_games": 4,
    "imagination_horizon": 4,
    "trust_exact_match": 0.0,
    "ppo_real_ratio": 0.5,
}
