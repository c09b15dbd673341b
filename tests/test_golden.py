"""Golden runs: short trainings whose every logged number is compared with a stored one.

    python tests/test_golden.py --write          # stores what this machine and this torch log
    python tests/test_golden.py --against REV    # the present code and a checkout of REV, to the last bit

A run is a script's own command line in this process, but that every layer starts with a gain of at least 1: heads that
start near 0 would hide what they read. Games are so short that in each iteration some end, some are cut, and some
players have left. Times are not compared.
"""

import argparse
import contextlib
import importlib.util
import io
import json
import math
import os
import platform
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from unittest import mock

os.environ["OMP_NUM_THREADS"] = "1"  # sums in one order

import pytest
import torch
from matplotlib.figure import Figure
from torch.utils.tensorboard import SummaryWriter

HERE = Path(__file__).resolve().parent
TORCH = ".".join(torch.__version__.split(".")[:2])
STORED = HERE / "golden" / f"{platform.machine()}-torch{TORCH}.json"
OF_CI = "x86_64-torch2.13.json"  # may not be missing
NOT_COMPARED = "time/"

TINY = {
    "device": "cpu",
    "height": 3,
    "width": 4,
    "num_players": 3,
    "num_hares": 3,
    "final_time": 6,
    "num_envs": 4,
    "num_steps": 8,
    "total_timesteps": 96,
    "log_every": 1,
    "learning_rate": 5e-3,
    "policy_hidden": 8,
    "update_epochs": 2,
    "num_minibatches": 2,
    "subgoal_hidden": 8,
    "goal_dim": 4,
    "subgoal_updates": 2,
    "subgoal_batch_size": 4,
    "subgoal_learning_rate": 5e-3,
    "wm_hidden": 16,
    "wm_updates": 2,
    "wm_batch_size": 16,
    "wm_learning_rate": 5e-3,
    "replay_rollouts": 2,
    "pretraining_updates": 3,
    "pretraining_games": 4,
    "imagination_horizon": 4,
    "trust_exact_match": 0.0,
    "ppo_real_ratio": 0.5,
}
TWO_STAGS = {"num_stags": 2, "steps_after_first_hunt": 2, "permute_ids": True}
WALLS = {"height": 4, "width": 5, "max_wall_pieces": 2}
SQUARE = {"height": 4, "width": 4, "max_wall_pieces": 1}  # quarter turns are symmetries
MIXED = {"seats": "learner,mixed,mixed", "redraw": "0.5"}
SEARCH = {"total_timesteps": 64, "num_simulations": 6, "num_trees": 2, "q_temperature": 5.0}
ONE_STEP = {"planner": "one-step", "num_simulations": 4}
HOP = {"method": "hop", "goal_dim": 2, "pretraining_updates": 0, "num_trees": 3}
DATA = {"num_samples": 300, "num_transitions": 300, "held_out_games": 20}
VAE = {"epochs": 4, "batch_size": 16}
WORLD = {"num_updates": 8, "log_every": 2, "batch_size": 16}

PPO_RUNS = {
    "ppo": {"method": "ppo", "num_envs": 5, "total_timesteps": 160},
    "ppo, two stags": {"method": "ppo", **TWO_STAGS},
    "ppo-omg": {"method": "ppo-omg", "pretraining_updates": 21},
    "ppo-omg, two stags, mixed seats": {"method": "ppo-omg", **TWO_STAGS, "seats": "learner,learner,mixed"},
    "hopplus": {},
    "actions": {"subgoals": "actions", **TWO_STAGS},
    "discrete": {"goal_kind": "discrete", "subgoal_selection": "optimistic"},
    "walls": {**WALLS, "final_time": 9},
    "mixed": {**MIXED, "subgoal_selection": "final", "watched_starts": 0.8},
    "steady": {"seats": "learner,mixed,mixed", "redraw": "never", "unsteady": 0.3},
    "two seeds": {"num_seeds": 2, "offline_ratio": 0.0},
    "shared": {"share_parameters": True, "num_seeds": 2, "trust_exact_match": 0.02},
    "critic-data real": {"critic_data": "real", "imagined_weight": 0.5},
    "real ratio 1": {"ppo_real_ratio": 1.0},
    "real ratio 0": {"ppo_real_ratio": 0.0, "trust_exact_match": 0.05},
    "log-every 2": {"total_timesteps": 128, "log_every": 2, "save_seconds": 0.0},
    "from pretrained": {"num_seeds": 2, "vae_checkpoint": "<vae>", "world_model_checkpoint": "<world model>"},
}
SEARCH_RUNS = {
    "puct": {**SEARCH, "total_timesteps": 96, "num_trees": 3},
    "puct, env, walls": {**SEARCH, **WALLS, "max_wall_pieces": 1, "search_model": "env"},
    "gumbel": {**SEARCH, "root": "gumbel", "search_model": "env", **TWO_STAGS},
    "gumbel, infer in tree": {**SEARCH, "root": "gumbel", "infer_in_tree": True},
    "one-step": {**SEARCH, **ONE_STEP, "search_model": "env", "hare_reward": -12.0},
    "one-step, world model": {**SEARCH, **ONE_STEP, "subgoals": "actions"},
    "policy-loss ppo": {**SEARCH, "policy_loss": "ppo", "search_model": "env", "infer_in_tree": True},
    "hop": {**SEARCH, **HOP},
    "hop, mixed": {**SEARCH, **HOP, **MIXED, "num_seeds": 2, "unsteady": 0.3},
    "search and imagination": {
        **{**SEARCH, "total_timesteps": 96},
        **{"imagination": True, "seats": "learner,mixed,learner"},
    },
}
CASES = {name: ("hopplus_ppo.py", TINY | flags) for name, flags in PPO_RUNS.items()}
CASES |= {name: ("hopplus_mcts.py", TINY | flags) for name, flags in SEARCH_RUNS.items()}
CASES |= {
    "8x8": (  # with its own defaults; with more of these a rounding would change what is drawn
        "hopplus_ppo.py",
        {
            "device": "cpu",
            "height": 8,
            "width": 8,
            "final_time": 12,
            "num_envs": 4,
            "num_steps": 16,
            "num_minibatches": 2,
            "update_epochs": 2,
            "total_timesteps": 128,
            "pretraining_updates": 3,
        },
    ),
    "hopplus by search's script": ("hopplus_mcts.py", TINY | {"method": "hopplus"}),
    "vae": ("pretrain_vae.py", TINY | DATA | VAE | {"num_seeds": 2}),
    "vae, discrete": ("pretrain_vae.py", TINY | SQUARE | DATA | VAE | {"goal_kind": "discrete"}),
    "vae, recon": ("pretrain_vae.py", TINY | DATA | VAE | {"goal_kind": "discrete", "loss": "recon"}),
    "vae, moa": ("pretrain_vae.py", TINY | TWO_STAGS | DATA | VAE | {"loss": "moa", "augment": False}),
    "world model": ("pretrain_world_model.py", TINY | DATA | WORLD | {"num_seeds": 2}),
    "world model, walls": ("pretrain_world_model.py", TINY | WALLS | DATA | WORLD),
    "world model, pixel": ("pretrain_world_model.py", TINY | TWO_STAGS | DATA | WORLD | {"wm_head": "pixel"}),
}


def load_script(root, name):
    path = Path(root, name)
    module_name = f"golden_{path.stem}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def prepared(module):
    """Every layer of the script starts with a gain of 1 or more, and no picture is drawn"""
    start = module.Linear.__init__

    def start_large(self, inputs, outputs, gain=1.0):
        start(self, inputs, outputs, max(gain, 1.0))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.Linear, "__init__", start_large)
        patch.setattr(Figure, "savefig", lambda *args, **kwargs: None)  # pictures take most of the time
        patch.setattr(SummaryWriter, "add_figure", lambda *args, **kwargs: None)
        for name in {"draw", "draw_cases"} & vars(module).keys() if hasattr(module, "load_data") else ():
            patch.setattr(module, name, lambda *_: mock.Mock())
        yield


def command_line(module, flags):
    """-> the flags as words, the names of those that the script does not have"""
    known = [*module.Args.__dataclass_fields__, *module.StagHuntConfig.__dataclass_fields__]
    words = []
    for name, value in flags.items():
        word = "--" + name.replace("_", "-")
        if name not in known:
            continue
        if isinstance(value, bool):
            words.append(word if value else word.replace("--", "--no-", 1))
        else:
            words += [word, str(value)]
    return words, sorted(flags.keys() - known)


def run_case(name, folder, root=HERE.parent):
    """Runs a case, and before it those whose checkpoint it starts from, unless `folder` has it already. -> its
    metrics, by name: a number of each row of each seed; the flags that the script lacks"""
    script, flags = CASES[name]
    run_dir = Path(folder, name.replace(" ", "_"))
    flags = flags | {"run_dir": run_dir}
    for flag, value in flags.items():
        if str(value).startswith("<"):
            needed = value.strip("<>")
            run_case(needed, folder, root)
            (flags[flag],) = Path(folder, needed.replace(" ", "_")).glob("*/checkpoint.pt")
    module = load_script(root, script)
    words, missing = command_line(module, flags)
    if not run_dir.exists():
        run_script(module, words)
    metrics = {}
    for path in sorted(run_dir.glob("*/metrics.jsonl")):
        for line in path.read_text().splitlines():
            for metric, value in json.loads(line).items():
                if not metric.startswith(NOT_COMPARED):
                    metrics.setdefault(metric, []).append(math.nan if value is None else value)
    return metrics, missing


def run_script(module, words):
    """What the script does when it is started with these words"""
    script = Path(module.__file__)
    entry = script.read_text().split('\nif __name__ == "__main__":\n')[1]
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    argv = sys.argv
    output = io.TextIOWrapper(io.BytesIO(), write_through=True)
    try:
        sys.argv = [script.name, *words]
        with prepared(module), contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            exec(textwrap.dedent(entry), module.__dict__ | {"__name__": "__main__"})
    except SystemExit as stop:
        printed = output.buffer.getvalue().decode()
        raise AssertionError(f"{script.name} {' '.join(words)}\n{printed}") from stop
    finally:
        sys.argv = argv
        for number, handler in handlers.items():
            signal.signal(number, handler)


def same(a, b, relative=0.0, absolute=0.0):
    if math.isnan(a) or math.isnan(b):
        return math.isnan(a) and math.isnan(b)
    return a == b or abs(a - b) <= relative * abs(b) + absolute


def differences(now, before, relative=0.0, absolute=0.0):
    """Sentences, one for each metric of both that is not the same"""
    found = []
    for metric in now.keys() & before.keys():
        pairs = list(zip(now[metric], before[metric], strict=False))
        equal = all(same(a, b, relative, absolute) for a, b in pairs)
        if not equal or len(now[metric]) != len(before[metric]):
            found.append(f"{metric}: {now[metric]}, not {before[metric]}")
    return sorted(found)


# ---- Tests


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("golden")


@pytest.fixture(scope="module")
def stored():
    if not STORED.exists():
        sentence = f"no {STORED.name}: on a commit that you trust, write it by python tests/test_golden.py --write"
        assert STORED.name != OF_CI, sentence
        pytest.skip(sentence)
    return json.loads(STORED.read_text())


def test_every_case_is_stored(stored):
    assert stored.keys() == CASES.keys()


@pytest.mark.parametrize("name", CASES)
def test_a_run_logs_what_is_stored(name, stored, folder):
    metrics, _ = run_case(name, folder)
    assert metrics.keys() == stored[name].keys()
    found = differences(metrics, stored[name], relative=1e-3, absolute=1e-5)
    assert not found, f"{len(found)} of {len(metrics)} metrics, the first ones:\n" + "\n".join(found[:5])


def test_where_nothing_is_searched_both_scripts_do_the_same(folder):
    with_search, _ = run_case("hopplus by search's script", folder)
    without, _ = run_case("hopplus", folder)
    assert without.keys() <= with_search.keys()
    assert not differences(with_search, without)


# ---- Command line


def run_all(root, names):
    """-> case -> [metrics, missing flags], or the reason why it does not run there"""
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            try:
                results[name] = run_case(name, folder, root)
            except AssertionError as error:
                results[name] = str(error)
    return results


def checkout(revision, folder):
    archive = subprocess.run(["git", "-C", HERE.parent, "archive", revision], capture_output=True, check=True)
    subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)


def compare(now, before, revision):
    """Prints what differs; -> is everything that both have the same?"""
    equal = True
    for name in now:
        broken = [f"{name} does not run {where}: {x}" for where, x in (("now", now[name]), (revision, before[name]))]
        broken = [text for text, x in zip(broken, (now[name], before[name]), strict=True) if isinstance(x, str)]
        if broken:
            print("\n".join(broken))
            equal = False
            continue
        metrics, missing = now[name]
        metrics_before, missing_before = before[name]
        found = differences(metrics, metrics_before)
        equal = equal and not found
        verdict = f"{len(found)} DIFFER" if found else "equal to the last bit"
        print(f"{name}: {len(metrics.keys() & metrics_before.keys())} metrics, {verdict}")
        print(textwrap.indent("\n".join(found[:3]), "    ") + "\n" * bool(found), end="")
        left_out = {
            "metrics now only": metrics.keys() - metrics_before.keys(),
            f"metrics {revision} only": metrics_before.keys() - metrics.keys(),
            "flags now only": set(missing_before) - set(missing),
            f"flags {revision} only": set(missing) - set(missing_before),
        }
        for what, names in left_out.items():
            if names:
                print(f"    left out, {what}: {', '.join(sorted(names))}")
    return equal


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="store what is logged here")
    parser.add_argument("--against", metavar="REV", help="compare with this version, to the last bit")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), help="these cases")
    parser.add_argument("--root", default=HERE.parent, help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    args = parser.parse_args()
    sys.path.insert(0, str(args.root))
    if args.out:
        results = run_all(args.root, args.only)
        Path(args.out).write_text(json.dumps(results))
    elif args.against:
        with tempfile.TemporaryDirectory() as folder:
            checkout(args.against, folder)
            command = [sys.executable, __file__, "--root", folder, "--out", f"{folder}/golden.json"]
            other = subprocess.Popen([*command, "--only", *args.only], cwd=folder)
            now = run_all(args.root, args.only)
            assert other.wait() == 0
            before = json.loads(Path(folder, "golden.json").read_text())
        sys.exit(not compare(now, before, args.against))
    elif args.write:
        results = run_all(args.root, list(CASES))
        lines = []
        for name, result in results.items():
            assert not isinstance(result, str), result
            metrics = {metric: [float(f"{x:.6g}") for x in values] for metric, values in result[0].items()}
            lines.append(f"{json.dumps(name)}: {json.dumps(metrics)}")
        STORED.parent.mkdir(exist_ok=True)
        STORED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        print(f"{STORED}, {STORED.stat().st_size / 1000:.0f} kB")
    else:
        parser.print_help()


if __name__ == "__main__":
    main()
