"""The game itself: is any seat favoured, and how many env-steps per second?

    python benchmarks/game.py --audit                     # exit code 1 if a seat is favoured
    python benchmarks/game.py --speed [--device cuda]

`--audit` tests whether all seats have the same mean return (seats of one game depend on each other,
hence Hotelling's T^2). `--speed` plays random legal actions and writes all observations; on a GPU
compiled and in a CUDA graph.
"""

import dataclasses
import itertools
import math
import sys
import timeit
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import stag_hunt_env as game
from stag_hunt_env import StagHuntConfig, StagHuntEnv, sample

import numpy as np
import scipy.stats
import torch
import tyro


def equal_means_p(returns):
    """p of equal means of all columns of [games, N], by Hotelling's T^2 and its exact distribution"""
    difference = returns[:, 1:] - returns[:, :1]
    mean = difference.mean(0)
    covariance = np.atleast_2d(np.cov(difference.T))
    games = len(difference)
    rank = np.linalg.matrix_rank(covariance, hermitian=True)
    if rank == 0:  # no game differs from another
        return float((mean == 0).all())
    t_squared = games * mean @ np.linalg.pinv(covariance, hermitian=True) @ mean
    f = t_squared * (games - rank) / (rank * (games - 1))
    return float(scipy.stats.f.sf(f, rank, games - rank))


def play_games(env, players):
    """One game in each place -> returns [B, N]"""
    seats = game.Seats(env, [[players] * env.config.num_players])
    state = env.initial_state()
    returns = 0
    for _ in range(env.config.final_time):  # a game that has ended pays nothing more
        state, reward, _, _ = env.transition(state, sample(seats.action_probs(state)))
        returns = returns + reward
    return returns


def audit(config, games, device, seed):
    """-> whether a seat is favoured"""
    header = "".join(f"seat {i}".rjust(16) for i in range(config.num_players))
    print(f"mean return with 95 % interval, {games} games a row")
    print("players".ljust(14) + "permute_ids".ljust(12) + header + "p".rjust(9))
    cases = list(itertools.product((False, True), ("random", "nearest_stag", "mixed")))
    favoured = False
    for number, (permute, players) in enumerate(cases):
        case = dataclasses.replace(config, permute_ids=permute)
        env = StagHuntEnv(case, min(games, 20_000), device, seed + number)
        batches = [play_games(env, players) for _ in range(math.ceil(games / env.num_envs))]
        returns = torch.cat(batches)[:games].double().cpu().numpy()
        mean = returns.mean(0)
        half = 1.96 * returns.std(0, ddof=1) / math.sqrt(len(returns))
        p = equal_means_p(returns)
        favoured |= p < 0.01 / len(cases)
        cells = [f"{m:.4f} ± {h:.4f}".rjust(16) for m, h in zip(mean, half, strict=True)]
        print(f"{players:<14}{permute!s:<12}{''.join(cells)}{p:>9.3f}", flush=True)
    verdict = "A SEAT IS FAVOURED" if favoured else "no seat is favoured"
    print(f"{verdict} (p < {0.01 / len(cases):.4f}: 0.01 over {len(cases)} rows)")
    return favoured


def random_actions(env, uniform):
    """Of each player the legal action whose stretch of [0, 1) holds the number"""
    edges = env.legal_actions(env.state).cumsum(-1)
    return (edges[..., :-1] <= uniform[..., None] * edges[..., -1:]).sum(-1)


def one_step(env, choose):
    shape = env.num_envs, env.config.num_players
    uniform = torch.rand(shape, generator=env.generator, device=env.device)
    env.step(choose(env, uniform))


def time_cpu(env):
    """Median seconds a step, over 100 steps after warm-up"""
    times = timeit.repeat(lambda: one_step(env, random_actions), number=1, repeat=105)
    return float(np.median(times[5:]))


def time_cuda(env, steps=10):
    """Median seconds a step, over 20 replays of a CUDA graph of `steps` steps after warm-up"""
    choose = torch.compile(random_actions, dynamic=False)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            one_step(env, choose)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(env.generator)
    with torch.cuda.graph(graph):
        for _ in range(steps):
            one_step(env, choose)
    times = []
    for _ in range(25):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000 / steps)
    return float(np.median(times[5:]))


def measure_speed(configs, batch_sizes, device, seed):
    cuda = device == "cuda"
    name = torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads"
    print(f"{name}, torch {torch.__version__}; random legal actions, all observations written")
    print(f"{'board':<8}{'games':>9}{'us/step':>10}{'M env-steps/s':>16}")
    for config, games in itertools.product(configs, batch_sizes):
        env = StagHuntEnv(config, games, device, seed, compile=cuda)
        seconds = time_cuda(env) if cuda else time_cpu(env)
        board = f"{config.height}x{config.width}"
        speed = games / seconds / 1e6
        print(f"{board:<8}{games:>9}{seconds * 1e6:>10.1f}{speed:>16.2f}", flush=True)


@dataclasses.dataclass
class Args:
    config: StagHuntConfig
    audit: bool = False  # test whether a seat is favoured
    speed: bool = False  # measure env-steps per second
    audit_games: int = 200_000  # for each row of the table
    batch_sizes: tuple[int, ...] = (4096, 65536, 524288)  # --speed: games at once
    sides: tuple[int, ...] = (4, 8)  # --speed: of square boards
    device: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() else "cpu"
    seed: int = 1


def main(args):
    """-> the exit code"""
    torch.manual_seed(args.seed)
    if args.speed:
        configs = [dataclasses.replace(args.config, height=x, width=x) for x in args.sides]
        measure_speed(configs, args.batch_sizes, args.device, args.seed)
    return int(args.audit and audit(args.config, args.audit_games, args.device, args.seed))


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, config=(tyro.conf.OmitArgPrefixes,))))
