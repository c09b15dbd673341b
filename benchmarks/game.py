"""The game itself: is any seat favoured, and how many env-steps per second?

    python benchmarks/game.py --audit                     # exit code 1 if a seat is favoured
    python benchmarks/game.py --speed [--device cuda]

`--audit` tests whether all seats have the same mean return (seats of one game depend on each other, hence Hotelling's
T^2). `--speed` plays random legal actions and writes all observations; on a GPU compiled and in a CUDA graph.
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
from stag_hunt_env import Count, StagHuntConfig, StagHuntEnv, Whole, resolve_device, sample

import numpy as np
import scipy.stats
import torch

AUDITED = ("random", "nearest_stag", "mixed")  # who sits in all seats


@dataclasses.dataclass
class BenchmarkArgs:
    audit: bool = False
    """test whether any seat is favoured; exit code 1 if so"""
    speed: bool = False
    """measure env-steps per second"""
    audit_games: Count = 200_000
    """--audit: games for each row of the table"""
    batch_sizes: tuple[int, ...] = (4096, 65536, 524288)
    """--speed: games played at once (more than 100 000 only on a GPU)"""
    sides: tuple[int, ...] = (4, 8)
    """--speed: sides of the square boards; --height and --width are for --audit"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where the games are played; auto: on the GPU if there is one"""
    seed: Whole = 1
    """seed of all randomness"""


@dataclasses.dataclass
class Args(BenchmarkArgs):
    config: StagHuntConfig = dataclasses.field(default_factory=StagHuntConfig)


def equal_means_p(returns: np.ndarray) -> float:
    """p of equal means of all columns of [games, N], by Hotelling's T^2 and its exact F distribution"""
    difference = returns[:, 1:] - returns[:, :1]
    mean, covariance = difference.mean(0), np.atleast_2d(np.cov(difference.T))
    games, rank = len(difference), np.linalg.matrix_rank(covariance, hermitian=True)
    if rank == 0:  # no game differs from another
        return float((mean == 0).all())
    t_squared = games * mean @ np.linalg.pinv(covariance, hermitian=True) @ mean
    return float(scipy.stats.f.sf(t_squared * (games - rank) / (rank * (games - 1)), rank, games - rank))


def play_games(env: StagHuntEnv, players: str) -> torch.Tensor:
    """One game in each place -> returns [B, N]"""
    n = env.config.num_players
    seats, state = game.Seats(env, [[players] * n]), env.initial_state()
    returns = torch.zeros(env.num_envs, n, device=env.device)
    for _ in range(env.config.final_time):  # a game that has ended pays nothing more
        state, reward, _, _ = env.transition(state, sample(seats.action_probs(state)))
        returns += reward
    return returns


def audit(args: Args) -> dict:
    table = []
    header = "".join(f"seat {i}".rjust(16) for i in range(args.config.num_players))
    print(f"mean return with 95 % interval, {args.audit_games} games a row")
    print("players".ljust(14) + "permute_ids".ljust(12) + header + "p".rjust(9))
    for permute in (False, True):
        config = dataclasses.replace(args.config, permute_ids=permute)
        for players in AUDITED:
            env = StagHuntEnv(config, min(args.audit_games, 20_000), args.device, args.seed + len(table))
            batches = [play_games(env, players) for _ in range(math.ceil(args.audit_games / env.num_envs))]
            returns = torch.cat(batches)[: args.audit_games].double().cpu().numpy()
            mean, half = returns.mean(0), 1.96 * returns.std(0, ddof=1) / math.sqrt(len(returns))
            p = equal_means_p(returns)
            table.append({"players": players, "permute_ids": permute, "mean": mean.tolist(), "p": p})
            cells = "".join(f"{m:.4f} ± {h:.4f}".rjust(16) for m, h in zip(mean, half, strict=True))
            print(f"{players:<14}{permute!s:<12}{cells}{p:>9.3f}", flush=True)
    threshold = 0.01 / len(table)
    favoured = any(row["p"] < threshold for row in table)
    verdict = "A SEAT IS FAVOURED" if favoured else "no seat is favoured"
    print(f"{verdict} (equal means refused below p = {threshold:.4f}: 0.01 over {len(table)} rows)")
    return {"table": table, "favoured": favoured}


def measure_speed(args: Args, configs: list[StagHuntConfig]) -> dict:
    device, table = resolve_device(args.device), []
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else f"CPU, {torch.get_num_threads()} threads"
    print(f"{name}, torch {torch.__version__}; random legal actions, all observations written")
    print(f"{'board':<8}{'games':>9}{'us/step':>10}{'M env-steps/s':>16}")
    choose = torch.compile(random_actions, dynamic=False) if cuda else random_actions
    for config, games in itertools.product(configs, [b for b in args.batch_sizes if cuda or b <= 100_000]):
        board = f"{config.height}x{config.width}"
        env = StagHuntEnv(config, games, device, args.seed, compile=cuda)
        seconds = time_cuda(env, choose) if cuda else time_cpu(env, choose)
        table.append({"board": board, "games": games, "env_steps_per_second": games / seconds})
        print(f"{board:<8}{games:>9}{seconds * 1e6:>10.1f}{games / seconds / 1e6:>16.2f}", flush=True)
    return {"table": table}


def random_actions(env, uniform):
    """uniform [B, N] in [0, 1) -> legal actions [B, N]: the one whose stretch of [0, 1) holds the number"""
    edges = game.random_probs(env, env.state, game.ALL_SEATS).cumsum(-1)
    return (edges[..., :-1] <= uniform[..., None] * edges[..., -1:]).sum(-1)


def one_step(env, choose):
    env.step(choose(env, torch.rand(env.num_envs, env.config.num_players, generator=env.generator, device=env.device)))


def time_cpu(env, choose) -> float:
    """Median seconds a step, over 100 steps after warm-up"""
    return float(np.median(timeit.repeat(lambda: one_step(env, choose), number=1, repeat=105)[5:]))


def time_cuda(env, choose, steps=10) -> float:
    """Median seconds a step, over 20 replays of a CUDA graph of `steps` steps after warm-up"""
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


def main(args: Args) -> dict:
    game.check_ranges(args)
    if not (args.audit or args.speed):
        raise game.UserError("nothing to do: --audit, --speed or both")
    if args.audit_games < 100:
        raise game.UserError(f"--audit-games must be >= 100, not {args.audit_games}")
    configs = [dataclasses.replace(args.config, height=side, width=side) for side in args.sides if args.speed]
    torch.manual_seed(args.seed)
    results = {"audit": audit(args)} if args.audit else {}
    return results | ({"speed": measure_speed(args, configs)} if args.speed else {})


def parse_args(words: list[str]) -> Args:
    return game.parse(Args, {"benchmark": BenchmarkArgs, "game": StagHuntConfig}, Args(), words)


if __name__ == "__main__":
    outcome = game.command_line(parse_args, main)
    sys.exit(1 if outcome.get("audit", {}).get("favoured") else 0)
