"""Learners of benchmarks/baselines/ppo_gru.py in the tools of this folder: frozen, learning as they play, or as
co-players of others. Inputs, networks, rollouts and PPO are those of their training.

Axes: M learners, one at each table, E games of each, T steps, n seats.
"""

import dataclasses
import math
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import stag_hunt_env as game
from benchmarks.baselines import ppo_gru
from evaluation import runs
from evaluation.runs import DECAY, Run, check_returns, copy_params, select_params

import torch

STEPS_OF_A_TEST = 8  # are played at once


# ---- Loading


def is_gru(path: str | Path) -> bool:
    content = runs.open_checkpoint(game.find_checkpoint(path))
    return content["format"].startswith("ppo-gru")


def load_checkpoint(path: Path) -> dict:
    """One seed's; its args are Args of ppo_gru.py"""
    saved = runs.open_checkpoint(path)
    game.refuse(saved["format"] != ppo_gru.FORMAT, f"{path} is no checkpoint of ppo_gru.py: {saved['format']}")
    try:
        config = game.StagHuntConfig(**saved["args"]["config"])
        flags = ppo_gru.Args(**saved["args"] | {"config": config})
        game.check_ranges(flags)
    except (KeyError, TypeError, ValueError) as error:
        raise game.UserError(f"{path}: its flags are not those of ppo_gru.py: {error}") from error
    return saved | {"args": flags}


def load_run(paths: list[str], device: str, words: list[str] | None = None) -> Run:
    """paths: one for each seed. words: flags of ppo_gru.py, changed. The memory that a learner carries over from game
    to game is that of its training (--keep-state), but it is never lost by chance."""
    paths = [game.find_checkpoint(path) for path in paths]
    saved = {path: load_checkpoint(path) for path in paths}
    by_seed = sorted(paths, key=lambda path: saved[path]["args"].seed)
    flags = saved[paths[0]]["args"]
    if words:
        flags = game.parse(ppo_gru.Args, ppo_gru.GROUPS, flags, words)
        game.check_ranges(flags)
    flags = dataclasses.replace(flags, device=device, num_seeds=len(paths), state_reset_prob=0.0)
    fresh = ppo_gru.Agent(flags, [0]).state_dict()
    for path in paths:
        for name, p in fresh.items():
            weight = saved[path]["agent"].get(name)
            fits = isinstance(weight, torch.Tensor) and weight.shape == p.shape
            game.refuse(not fits, f"{path}: {name} is missing or is not that of {paths[0]}'s flags")
    weights = {name: torch.cat([saved[path]["agent"][name] for path in by_seed]) for name in fresh}
    torch.backends.cuda.matmul.allow_tf32 = True  # as in training
    seeds = [saved[path]["args"].seed for path in by_seed]
    checkpoint = {
        "args": dataclasses.asdict(flags) | {"seed": seeds[0], "share_parameters": False},
        "states": [{"networks": {"agent": weights}}],
        "seeds": seeds,
    }
    return Run(paths[0], checkpoint, ppo_gru, flags, game.resolve_device(device))


def check_seeds(run: Run) -> None:
    """Refuses seeds that cannot be told by the first and their number"""
    seeds = run.checkpoint["seeds"]
    follow = seeds == list(range(seeds[0], seeds[0] + len(seeds)))
    game.refuse(not follow, f"PATHS: the seeds must follow each other, not {', '.join(map(str, seeds))}")


def load_agent(run: Run, index: list[int]) -> ppo_gru.Agent:
    """Its learner m has the weights of seed index[m]"""
    agent = ppo_gru.Agent(run.args, [0])
    for name, p in agent.named_parameters():
        p.data = run.networks["agent"][name][index]
    return agent.to(run.device)


# ---- As co-players


class OwnSeats(NamedTuple):
    """What agent_inputs of ppo_gru.py asks of Seats, for any seats of any games"""

    place: torch.Tensor  # int64 [n]
    seat: torch.Tensor  # int64 [n]

    def to_learners(self, x):
        """[B, N, ...] by seat -> [1, n, ...]"""
        return x[self.place, self.seat][None]

    def per_learner(self, x):
        """[B, ...] -> [1, n, ...]"""
        return x[self.place][None]


class GruPlayers:
    """A frozen learner of one seed in those seats that `is_own` bool [B, N] names. In each step call `probs`, step the
    games, then `update`. All that goes on is changed in place. What is remembered outlasts a game as in training, and
    is never lost by chance."""

    def __init__(self, run: Run, env: game.StagHuntEnv, is_own: torch.Tensor):
        here = dataclasses.asdict(env.config)
        trained = dataclasses.asdict(run.args.config)
        differ = [f"{name} {value}" for name, value in trained.items() if value != here[name]]
        game.refuse(bool(differ), f"{run.path} was trained in another game: {', '.join(differ)}")
        self.env = env
        self.keep_state = run.args.keep_state
        self.agent = load_agent(run, [0])
        self.own = OwnSeats(*is_own.to(env.device).nonzero(as_tuple=True))
        rows = (1, len(self.own.place))
        self.memory = ppo_gru.first_rollout_state(run.args, rows, env.device)
        self.next_state = self.memory.state.clone()  # of the GRU, once the step is played
        self.before = game.copy_state(env.state)  # the games at the last `probs`

    @torch.no_grad()
    def probs(self, state: game.State) -> torch.Tensor:
        """[B, N, 7]; 0 where others sit"""
        x = ppo_gru.agent_inputs(self.env, state, self.own, self.memory)
        legal = self.own.to_learners(self.env.legal_actions(state))
        reset = self.memory.reset
        log_probs, _, next_state = self.agent(x[:, None], legal[:, None], reset[:, None], self.memory.state)
        self.next_state.copy_(next_state)
        for kept, now in zip(self.before, state, strict=True):
            kept.copy_(now)
        probs = torch.zeros(*state.position.shape, game.NUM_ACTIONS, device=state.position.device)
        probs[self.own.place, self.own.seat] = log_probs[0, 0].exp()
        return probs

    @torch.no_grad()
    def update(self, actions: torch.Tensor, done: torch.Tensor) -> None:
        """actions [B, N], done [B] of the step that was played after `probs`"""
        _, reward, _, _ = self.env.transition(self.before, actions)
        joint = self.own.to_learners(self.env.seats_to_ego(actions))
        forget = self.own.per_learner(done)
        if self.keep_state:
            forget = torch.zeros_like(forget)
        self.memory.state.copy_(self.next_state)
        self.memory.last_joint.copy_(joint.masked_fill(forget[..., None], game.STAY))
        self.memory.last_reward.copy_(self.own.to_learners(reward).masked_fill(forget, 0.0))
        self.memory.reset.copy_(forget)


# ---- Learning as they play


def join_games(batches: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Sequences [M, T, E, ...], as long as each other -> [M, T, all of their E, ...]"""
    joined = {}
    for name in batches[0]:
        axis = 1 if name == "state" else 2
        joined[name] = torch.cat([batch[name] for batch in batches], axis)
    return joined


def capture_rollout(flags: ppo_gru.Args, agent: ppo_gru.Agent, games: tuple):
    """() -> what ppo_gru.rollout returns; on a GPU a CUDA graph from its second call on"""
    env, seats, rollout_state = games

    def play():
        return ppo_gru.rollout(flags, env, seats, agent, rollout_state)

    def capture(function):
        return ppo_gru.capture(function, env) if env.device.type == "cuda" else function

    return runs.capture_later(play, capture)


def play_held_out(run: Run, flags: ppo_gru.Args, play, rollout_state: ppo_gru.RolloutState):
    """Plays on with play() until two games have ended in each place: what is under way began with other weights. ->
    mean return of the second games and its squared standard error [M], steps played with each learner"""
    ended = torch.zeros(rollout_state.reset.shape, dtype=torch.int64, device=run.device)
    total = torch.zeros(ended.shape, device=run.device)
    steps = 0
    while int(ended.min()) < 2:
        batch = play()
        runs.check_decisions(run.path, batch["log_prob"][..., None])
        number = ended[:, None] + batch["done"].cumsum(1)
        is_second = batch["done"] & (number == 2)
        total += (is_second * batch["final_return"]).sum(1)
        ended = number[:, -1]
        steps += flags.num_steps * flags.num_envs
    return total.mean(1), total.var(1) / total.shape[1], steps


def gru_loop(args, run: Run, tables: list, index: list[int], mode: str, seat_others=None):
    """As adaptation_loop of adapt.py, whose args it reads: a generator, one round at a time. -> return and number of
    the learner's games that ended [M, 2], metrics [M]

    seat_others: Seats -> Seats, with learned co-players in place of some in `tables`.
    A round is cut into as many sequences as there are minibatches if it can be. `test steps`: those that a
    learner has practised and was tested in so far, which are not counted as steps."""
    learn = mode == "learning"
    sequences = math.gcd(args.every, args.num_minibatches)
    flags = dataclasses.replace(
        run.args,
        seed=args.seed,
        num_envs=args.games_at_once,
        num_steps=args.every // sequences,
        num_minibatches=sequences,
        learning_rate=args.learning_rate,
        update_epochs=args.update_epochs,
        ent_coef=args.ent_coef,
    )

    def make_games(flags):
        env, seats, rollout_state = ppo_gru.make_games(flags, tables)
        if seat_others is not None:
            seats = seat_others(seats)
        return env, seats, rollout_state

    agent = load_agent(run, index)
    optimizer = ppo_gru.make_optimizer(flags, agent)
    games = make_games(flags)
    came_with = learned = copy_params(agent)
    gain = variance = torch.zeros(len(tables), device=run.device)
    test_steps = 0
    metrics = {"test steps": torch.zeros_like(gain)}
    if learn:
        practice_flags = dataclasses.replace(flags, seed=args.seed + 2, num_envs=1)
        test_flags = dataclasses.replace(
            flags,
            seed=args.seed + 1,
            num_envs=args.imagined_games,
            num_steps=STEPS_OF_A_TEST,
        )
        held_out = make_games(test_flags)
        practise = capture_rollout(flags, agent, make_games(practice_flags))
        test = capture_rollout(test_flags, agent, held_out)
    play = capture_rollout(flags, agent, games)

    def play_round(play):
        batches = []
        for _ in range(sequences):
            batch = play()
            runs.check_decisions(run.path, batch["log_prob"][..., None])
            batches.append({name: x.clone() for name, x in batch.items()})  # a graph's stay in place
        return batches

    def held_out_return():
        remembered = games[-1]
        for kept, of_games in zip(held_out[-1], remembered, strict=True):
            kept.copy_(of_games[:, :1].expand_as(kept))
        return play_held_out(run, test_flags, test, held_out[-1])

    for _ in range(args.steps // args.every):
        batches = play_round(play)
        done = torch.cat([batch["done"] for batch in batches], 1)
        returns = done * torch.cat([batch["final_return"] for batch in batches], 1)
        earned = torch.stack([returns.sum((1, 2)), done.sum((1, 2))], 1)
        if learn:
            agent.load_state_dict(learned)
            batches = play_round(practise)  # PPO learns from what the new weights do, whoever acts
            test_steps += args.every
            batch = join_games([ppo_gru.with_advantages(flags, batch) for batch in batches])
            ppo_gru.ppo_update(flags, agent, optimizer, batch)
            learned = copy_params(agent)
            new, new_error, new_steps = held_out_return()
            agent.load_state_dict(came_with)
            old, old_error, old_steps = held_out_return()
            check_returns(run, "held-out return", new, new_error, old, old_error)
            gain = DECAY * gain + new - old
            variance = DECAY**2 * variance + new_error + old_error
            better = gain > 2 * variance.sqrt()
            agent.load_state_dict(select_params(better, learned, came_with))
            test_steps += new_steps + old_steps
            metrics = {
                "held-out return": torch.where(better, new, old),
                "policy changed": better,
                "test steps": torch.full_like(old, test_steps),
            }
        yield earned.cpu().numpy(), metrics
