"""README, docs and docstrings tell the truth: commands parse, flags and metrics exist, the edits train."""

import dataclasses
import functools
import importlib.util
import re
import shlex
import shutil
import sys
import tempfile
import unittest.mock
from pathlib import Path

import hopplus_mcts
import hopplus_ppo
import pretrain_vae
import pretrain_world_model
import stag_hunt_env
from benchmarks import sections
from evaluation import adapt, evaluate, inspector, partners, runs, subgoals
from stag_hunt_env import StagHuntConfig, parse

import pytest
import torch
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

sys.path.insert(0, str(Path(stag_hunt_env.__file__).resolve().parent / "benchmarks"))
sys.path.insert(0, str(Path(stag_hunt_env.__file__).resolve().parent / "benchmarks" / "baselines"))

import dashboard
import decisions
import experiments
import game
import peers
import ppo_gru
import scripted
import search
import speed

ROOT = Path(stag_hunt_env.__file__).resolve().parent
TRAINING = {"hopplus_ppo.py": hopplus_ppo, "hopplus_mcts.py": hopplus_mcts}
MODULES = {
    **TRAINING,
    **{"stag_hunt_env.py": stag_hunt_env, "pretrain_vae.py": pretrain_vae},
    **{"pretrain_world_model.py": pretrain_world_model, "evaluation/evaluate.py": evaluate},
    **{"evaluation/adapt.py": adapt, "evaluation/subgoals.py": subgoals},
    "benchmarks/dashboard.py": dashboard,
    "benchmarks/decisions.py": decisions,
    **{"benchmarks/experiments.py": experiments, "benchmarks/game.py": game, "benchmarks/search.py": search},
    **{"benchmarks/speed.py": speed, "benchmarks/baselines/ppo_gru.py": ppo_gru, "benchmarks/peers.py": peers},
    **{"benchmarks/scripted.py": scripted, "evaluation/partners.py": partners, "evaluation/inspector.py": inspector},
}
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")]
SHELL = {"cp", "date", "while", "done", "cat", "grep", "do", "sleep", "echo", "tensorboard", "nvidia-cuda-mps-control"}
FOREIGN = {
    "--dist",
    "--nproc-per-node",
    "--nnodes",
    "--rdzv-backend",
    "--rdzv-endpoint",
    "--logdir",
    "--transitions",
    "--help",
}
TINY = {  # flags for runs of a second
    "config": StagHuntConfig(height=3, width=4, num_players=3, num_hares=3, final_time=6),
    **{"num_envs": 4, "num_steps": 8, "total_timesteps": 64, "log_every": 1, "policy_hidden": 16},
    **{"num_minibatches": 2, "subgoal_hidden": 8, "goal_dim": 5, "subgoal_batch_size": 2, "wm_hidden": 16},
    **{"wm_batch_size": 16, "pretraining_updates": 2, "pretraining_games": 4, "replay_rollouts": 2},
    **{"imagination_horizon": 4, "trust_exact_match": 0.0},
}


# ---------------------------------------------------------------------------------------------------------------------
# The edits


def edits(page: str) -> dict[str, str]:
    """Name of the copy -> its diff"""
    found = re.findall(r"```diff\n--- \S+\n\+\+\+ (\S+)\.py\n(.*?)```", (ROOT / page).read_text(), re.S)
    return dict(found)


def apply_edit(script: str, diff: str) -> str:
    for hunk in re.split(r"^@@.*@@\n", diff, flags=re.M)[1:]:
        lines = hunk.splitlines(keepends=True)
        before, after = ("".join(line[1:] for line in lines if line[0] in kept) for kept in (" -", " +"))
        assert script.count(before) == 1, f"stands {script.count(before)} times in the script:\n{before}"
        script = script.replace(before, after)
    return script


@functools.cache
def edited(name: str):
    """The edited copy as a module"""
    folder = Path(tempfile.mkdtemp())
    path = folder / f"{name}.py"
    path.write_text(apply_edit((ROOT / "hopplus_ppo.py").read_text(), edits("docs/editing.md").get(name, "")))
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_there_are_five_edits():
    assert edits("docs/editing.md").keys() == {"my_cnn", "my_reward", "my_world_model", "my_ablation", "my_curve"}
    assert edits("README.md").items() <= edits("docs/editing.md").items()


def check_cnn(script, state, metrics):
    first = state.networks.policy.params["encoder.weight"]
    assert first.shape[:3] == (3, 32, 6) and first.grad.abs().sum() > 0
    encoder = state.networks.policy.network.encoder
    board = torch.randint(13, (3, 8, 7), generator=torch.Generator().manual_seed(1))
    walls = torch.zeros(3, 8, 1)
    whole = encoder(board, walls)
    halves = encoder(board.view(6, 4, 7), walls.view(6, 4, 1))  # as a long batch on a GPU
    torch.testing.assert_close(halves.view_as(whole), whole)


def check_reward(script, state, metrics):
    """The learner in a corner, then gone; others beside it, two steps away, on its cell, around the board's edge"""
    gone = 12
    boards = [[0, gone, 1], [0, gone, 5], [0, 0, gone], [0, gone, gone], [gone, 0, 11], [3, 4, gone]]
    next_board = torch.tensor(boards, dtype=torch.uint8)[:, None]
    shaped = script.shape_reward(state.args, state.args.config, torch.ones(6, 1), None, None, next_board)
    assert shaped.flatten().tolist() == [11, 1, 11, 1, 1, 1]
    assert min(metrics["real/reward_mean"], metrics["imagined/reward_mean"]) > 2 > metrics["charts/episodic_return"]


def check_world_model(script, state, metrics):
    assert state.networks.world.params["trunk.0.weight"].grad.abs().sum() > 0 and "wm/payoff_match/1" in metrics
    learning = state.args, state.networks, state.optimizers["world"], state.games.replay, None
    losses = [script.train_world_model(*learning, updates=20)["losses/world_model"].mean() for _ in range(2)]
    assert losses[1] < 0.9 * losses[0], "it learns"


def check_ablation(script, state, metrics):
    batch = script.train_iteration(state)["imagined"]
    assert set(batch["weight"].flatten().tolist()) <= {0.0, 1.0, 0.5, 0.25, 0.125} and (batch["weight"] == 0.25).any()


def check_curve(script, state, metrics):
    state.metrics.read()
    boards = script.train_iteration(state)["transitions"].board
    found = state.metrics.read()["my/together"]
    for learner, board in enumerate(boards):
        together = 0
        for cells in board.flatten(0, 1)[:, :3].tolist():
            there = [cell for cell in cells if cell < 12]
            together += len(set(there)) < len(there)
        assert found[learner] == pytest.approx(together / 32)
    folder = Path(metrics["checkpoint"]).parent
    curve = EventAccumulator(str(folder)).Reload().Scalars("my/together")
    assert [point.step for point in curve] == [32, 64]
    assert curve[1].value == pytest.approx(metrics["my/together"]) and found.max() > 0


@pytest.mark.parametrize(
    ("name", "changes", "check"),
    [
        ("my_cnn", {}, check_cnn),
        ("my_reward", {"company_bonus": 10.0}, check_reward),
        ("my_world_model", {"wm_learning_rate": 0.03}, check_world_model),
        ("my_ablation", {"depth_discount": 0.5}, check_ablation),
        ("my_curve", {}, check_curve),
    ],
)
def test_the_edit_trains(name, changes, check, tmp_path, monkeypatch):
    diff = edits("docs/editing.md")[name]
    assert sum(line[:1] in ("+", "-") for line in diff.splitlines()) <= 30
    script, states = edited(name), []
    made = script.make_train_state
    monkeypatch.setattr(script, "make_train_state", lambda *given: states.append(made(*given)) or states[-1])
    args = script.make_args("hopplus", "cpu", **TINY, **changes, run_dir=str(tmp_path))
    metrics = script.main(args)
    folder = Path(metrics["checkpoint"]).parent
    assert folder.name.startswith(f"{name}__3x4"), "runs of a copy have its own name"
    (state,) = states
    check(script, state, metrics)
    monkeypatch.setattr(evaluate, "film", lambda *_: None)
    words = [str(folder), "--script", script.__file__, "--games", "4", "--device", "cpu"]
    returns = evaluate.main(evaluate.parse_args(words))
    assert returns.keys() == {*(f"return/player_{i}" for i in range(3)), "return/learners"}


# ---------------------------------------------------------------------------------------------------------------------
# Commands and flags


def command_lines():
    """Every line of code in a page or in a docstring"""
    for page in PAGES:
        text = page.read_text()
        for block in re.findall(r"```bash\n(.*?)```", text, re.S):
            yield from block.replace("\\\n", " ").splitlines()
        yield from re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.S))
    for script in MODULES:
        docstring = (ROOT / script).read_text().split('"""')[1]
        yield from re.findall(r"^    (.*)", docstring.replace("\\\n", " "), re.M)


def commands() -> list[tuple[str, ...]]:
    found = set()
    launched = r"(?:^|(?:python3?|torchrun) (?:-[^ ]+ (?:[^ -][^ ]* )?)*)([\w/]+\.py(?:\s[^#&|;<>]*)?)"
    for line in command_lines():
        for command in re.findall(launched, line.strip()):
            words = shlex.split(re.sub(r"[\[\]]|\.\.\.", "", command))
            if line.count("python") or line.count("torchrun") or len(words) > 1:  # else only a file's name
                found.add(tuple(words))
    return sorted(found)


def parse_command(script: str, words: list[str]):
    if script == "benchmarks/speed.py":
        return parse(speed.Args, {"speed": speed.Args}, speed.Args(), words)
    module = edited(script[:-3]) if script.startswith("my_") else MODULES[script]
    return module.parse_args(words)


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_the_command_is_understood(command, monkeypatch):
    """Also the flags after --, which are another script's"""
    script, *words = command
    for module in (runs, adapt):
        monkeypatch.setattr(module, "load_run", lambda args, words, needs: None)  # there is no run
    if "--help" in words:
        return
    if "--resume" in words:
        with pytest.raises(stag_hunt_env.UserError, match=r"--resume runs/RUN.* there is no checkpoint"):
            parse_command(script, words)
        return
    parse_command(script, words)
    if "--" in words:
        own = script == "benchmarks/experiments.py" and "hopplus_mcts.py" not in words  # see --script
        other = hopplus_ppo if own else hopplus_mcts
        other.parse_args(words[words.index("--") + 1 :])


def shrunk(args, folder):
    """The flags of a command with the sizes of a run of a second"""
    most = {"num_seeds": 2, "num_envs": 4, "num_steps": 8, "total_timesteps": 32, "imagination_horizon": 4}
    most |= {"num_minibatches": 2, "pretraining_updates": 1, "pretraining_games": 4, "replay_rollouts": 2}
    most |= {"subgoal_hidden": 8, "subgoal_batch_size": 2, "subgoal_updates": 1, "wm_hidden": 16, "wm_batch_size": 16}
    most |= {"policy_hidden": 16, "num_simulations": 2, "num_trees": 2, "num_samples": 50, "epochs": 1, "batch_size": 8}
    most |= {"num_transitions": 50, "num_updates": 2, "held_out_games": 8, "log_every": 1}
    small = {name: min(getattr(args, name), size) for name, size in most.items() if hasattr(args, name)}
    config = args.config
    config = dataclasses.replace(config, height=min(config.height, 4), width=4, final_time=min(config.final_time, 6))
    given = {"device": "cpu", "run_dir": str(folder), "compile": False, "precision": "fp32", "config": config}
    return dataclasses.replace(args, **small, **{name: x for name, x in given.items() if hasattr(args, name)})


# Flags that make no other kind of run, with one word after them
SIZES = {"--seed", "--num-seeds", "--exp-name", "--device", "--precision", "--log-every", "--total-timesteps"}
SIZES |= {"--num-envs", "--num-minibatches", "--subgoal-batch-size", "--pretraining-updates", "--num-updates"}
SIZES |= {"--epochs", "--batch-size", "--num-samples", "--num-transitions", "--num-simulations", "--num-trees"}
SIZES |= {"--height", "--width", "--max-wall-pieces", "--num-stags", "--final-time"}


def trainings() -> dict[str, tuple[str, ...]]:
    """Commands that train; of those that differ only in size and board, one"""
    elsewhere = {"--help", "--resume", "--evaluate", "--vae-checkpoint", "--world-model-checkpoint"}  # they need a run
    found = {}
    for script, *words in commands():
        if (script in TRAINING or script.startswith(("my_", "pretrain_"))) and not elsewhere & set(words):
            before = ["", *words]
            kind = [word for word, last in zip(words, before, strict=False) if not {word, last} & SIZES]
            found.setdefault(" ".join([script, *kind]).replace(" --compile", ""), (script, *words))
    return found


@pytest.mark.parametrize("command", trainings().values(), ids=" ".join)
def test_the_command_trains(command, tmp_path, monkeypatch):
    script, *words = command
    module = edited(script[:-3]) if script.startswith("my_") else MODULES[script]
    if script.startswith("pretrain_"):
        monkeypatch.setattr(module, "draw_pictures", lambda *_: None)
    module.main(shrunk(parse_command(script, words), tmp_path))
    assert all((folder / "metrics.jsonl").stat().st_size for folder in tmp_path.iterdir())


@pytest.fixture(scope="module")
def tiny_runs(tmp_path_factory):
    """Folders of runs: two seeds of each training script, and a learner with a partner that stays"""
    partner = "--seats learner,mixed,nearest_hare,nearest_hare --redraw never"
    folders = {}
    for kind, script, flags in (("ppo", hopplus_ppo, ""), ("mcts", hopplus_mcts, ""), ("one", hopplus_ppo, partner)):
        args = shrunk(script.parse_args(["--num-seeds", "2", *flags.split()]), tmp_path_factory.mktemp("runs"))
        folders[kind] = str(Path(script.main(args)["checkpoint"]).parent)
    return folders


def evaluations() -> list[tuple[str, ...]]:
    gru = "runs/ppo_gru__*"  # its runs have tests of their own
    return [command for command in commands() if command[0].startswith("evaluation/") and gru not in command]


@pytest.mark.parametrize("command", evaluations(), ids=" ".join)
def test_the_evaluation_runs(command, tiny_runs, tmp_path, monkeypatch):
    script, *words = command
    searching = {"search", "both", "--planner", "--num-simulations", "hopplus_mcts.py"} & set(words)
    kind = "one" if script == "evaluation/partners.py" else "mcts" if searching else "ppo"
    shutil.copytree(tiny_runs[kind], tmp_path / "RUN")
    if "--others" in words:
        shutil.copytree(tiny_runs["mcts"], tmp_path / "runs/RUN_A")
        shutil.copytree(tiny_runs["one"], tmp_path / "runs/RUN_B")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(evaluate, "film", lambda *_: None)
    monkeypatch.setattr(Figure, "savefig", lambda _, path, **options: Path(path).touch())
    monkeypatch.setattr(adapt, "SETS", {name: sets[:1] for name, sets in adapt.SETS.items()})
    copy = str(ROOT / ("hopplus_mcts.py" if searching else "hopplus_ppo.py"))
    words = [{"runs/RUN": "RUN", "my_idea.py": copy, "my_copy.py": copy}.get(word, word) for word in words]
    words = [copy if word == "hopplus_mcts.py" else word for word in words]
    end = words.index("--") if "--" in words else len(words)
    words[end:end] = {
        "evaluation/evaluate.py": "--games 2",
        "evaluation/inspector.py": "--games 1 --samples 1 --steps-ahead 1",
        "evaluation/adapt.py": "--steps 32 --every 8 --repetitions 2 --no-references --imagined-games 2 --rounds 1"
        " --update-epochs 1 --num-minibatches 1 --subgoal-updates 1",
        "evaluation/subgoals.py": "--games 4",
        "evaluation/partners.py": "--games-together 1 --places 8",
    }[script].split()
    before = set(tmp_path.rglob("*"))
    MODULES[script].main(MODULES[script].parse_args(words))
    assert set(tmp_path.rglob("*")) - before, "it leaves a file"


def test_experiments_that_pages_name_exist():
    for script, *words in commands():
        args = parse_command(script, words) if script == "benchmarks/experiments.py" else experiments.Args()
        assert set(args.section) <= experiments.SECTIONS.keys(), f"{args.section}: no such section"
        assert set(args.patched) <= experiments.PATCHES.keys(), f"{args.patched}: no such mistake"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_line_of_code_is_known(page):
    """What a block of shell commands runs is one of our scripts, which other tests parse and run, or a common tool"""
    for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.S):
        for line in block.replace("\\\n", " ").splitlines():
            for part in re.split(r"&&|[;|&]", re.sub(r"\s+#.*|2> \S+", "", line)):
                words = [word for word in part.split() if not re.fullmatch(r"[A-Z_]+=\S*|!", word)]
                program = words[0].removeprefix(".venv/bin/") if words else "echo"
                if program in ("python", "python3", "torchrun"):
                    named = next((word for word in words if word.endswith(".py")), None)
                    known = named in MODULES or re.fullmatch(r"my_\w+\.py", named or "")
                    assert known or words[1:3] in (["-m", "venv"], ["-m", "pytest"]), line
                elif program == "pip":
                    assert words[1:3] == ["install", "-r"] and (ROOT / words[3]).is_file(), line
                else:
                    assert program in SHELL, f"{line}: nobody checks {program}"


def test_every_training_page_launches_the_three_settings():
    for script in (*TRAINING, "pretrain_vae.py", "pretrain_world_model.py"):
        page = ROOT / f"docs/{script[:-3]}.md"
        (block,) = re.findall(r"\nThree settings:\n\n```bash\n(.*?)```", page.read_text(), re.S)
        launched = [shlex.split(line, comments=True) for line in block.splitlines()]
        assert {tuple(words[:2]) for words in launched} == {("python", script)}
        games = [parse_command(script, words[2:]).config for words in launched]
        assert games == [
            StagHuntConfig(height=4, width=4, num_hares=4, num_stags=1, max_wall_pieces=0),
            StagHuntConfig(height=4, width=4, num_hares=4, num_stags=2, max_wall_pieces=0),
            StagHuntConfig(height=8, width=8, num_hares=4, num_stags=1, max_wall_pieces=5),
        ]


def test_the_authors_values_are_one_command():
    flags = f"--method hop {sections.AUTHORS_VALUES} {sections.AUTHORS_BOARD}"
    assert ("hopplus_mcts.py", *flags.split()) in commands()


def test_there_are_many_commands():
    assert len(commands()) > 60 and {command[0] for command in commands()} >= MODULES.keys()


def known_flags() -> set[str]:
    """As --help names them"""
    found = set(FOREIGN)
    for script in (*MODULES, "my_ablation.py", "my_reward.py"):
        module = edited(script[:-3]) if script.startswith("my_") else MODULES[script]
        kinds = [module.Args, StagHuntConfig]
        for field in (field for kind in kinds for field in kind.__dataclass_fields__.values()):
            name = field.name.replace("_", "-")
            found |= {f"--{name}", f"--no-{name}"} if field.type is bool else {f"--{name}"}
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_flag_exists(page):
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", page.read_text()))
    assert named <= known_flags(), sorted(named - known_flags())


# ---------------------------------------------------------------------------------------------------------------------
# Metrics


@functools.cache
def logged(script: str) -> dict[str, set[str]]:
    """What a tiny run of a script logs: {"scalars": tags, "images": tags, "histograms": tags}"""
    with tempfile.TemporaryDirectory() as folder:
        if script in TRAINING:
            changes = {"num_simulations": 2} if script == "hopplus_mcts.py" else {}
            method = "hopplus-mcts" if changes else "hopplus"
            flags = TINY | changes | {"run_dir": folder}
            MODULES[script].main(MODULES[script].make_args(method, "cpu", **flags))
        else:
            small = {
                "pretrain_vae.py": "--num-samples 50 --epochs 1 --subgoal-hidden 8",
                "pretrain_world_model.py": "--num-transitions 50 --num-updates 2 --wm-hidden 16",
            }[script]
            words = f"{small} --held-out-games 8 --device cpu --run-dir {folder}".split()
            with unittest.mock.patch.object(MODULES[script], "draw_pictures"):
                MODULES[script].main(MODULES[script].parse_args(words))
        events = EventAccumulator(str(next(Path(folder).iterdir())))
        events.Reload()
        return {kind: set(events.Tags()[kind]) for kind in ("scalars", "images", "histograms")}


def matches(documented: str, tag: str) -> bool:
    """`wm/exact_match/k` stands for all k; so do a (action), c (plane), e (event) and i (player)"""
    return re.fullmatch(re.sub(r"(?<=[/_])[aceik]$", r"\\w+", documented), tag) is not None


def metric_table(page: str, heading: str) -> set[str]:
    """Tags in the first column of the table under a heading"""
    part = (ROOT / page).read_text().split(f"\n{heading}\n", 1)[1]
    rows = re.search(r"(?:^\|.*\n)+", part, re.M)[0].splitlines()[2:]
    return {tag for row in rows for tag in re.findall(r"`([^`]+)`", row.split("|")[1])}


@pytest.mark.parametrize("script", TRAINING)
def test_the_tables_of_metrics_are_complete(script):
    table = metric_table("docs/hopplus_ppo.md", "## Logged metrics")
    if script == "hopplus_mcts.py":
        table |= metric_table("docs/hopplus_mcts.md", "## Logged metrics")
    tags = logged(script)["scalars"]
    for tag in sorted(tags):
        assert any(matches(documented, tag) for documented in table), f"{tag} is logged, but not documented"
    for documented in table:
        silent = documented.startswith("imagined/") and script == "hopplus_mcts.py"  # it does not imagine
        found = any(matches(documented, tag) for tag in tags)
        assert found or silent, f"{documented} is documented, but not logged"


@pytest.mark.parametrize("script", ["pretrain_vae.py", "pretrain_world_model.py"])
def test_the_tables_of_pretraining_are_complete(script):
    def short(tags):  # one table for the same metrics of several predictors, and at the end of a run
        return {re.sub(r"^(moa_prior|moa/bayes|moa/ceiling)/", "moa/", tag.replace("wm_final/", "wm/")) for tag in tags}

    table = short(metric_table(f"docs/{script[:-3]}.md", "## Logged metrics"))
    tags = short(logged(script)["scalars"])
    assert {tag for tag in tags if not any(matches(documented, tag) for documented in table)} == set()
    assert {documented for documented in table if not any(matches(documented, tag) for tag in tags)} == set()


def test_every_metric_that_a_page_names_exists():
    tags = set()
    for script in (*TRAINING, "pretrain_vae.py", "pretrain_world_model.py"):
        tags |= set.union(*logged(script).values())
    tags |= {tag[: tag.rindex("/") + 1] for tag in tags if "/" in tag}  # a whole group
    groups = {tag.split("/")[0] for tag in tags if "/" in tag}
    for page in PAGES:
        named = set(re.findall(r"`(\w+/[\w/]*)`", page.read_text()))
        missing = {tag for tag in named if tag.split("/")[0] in groups and not any(matches(tag, t) for t in tags)}
        assert not missing, f"{page.name} names {sorted(missing)}"


# ---------------------------------------------------------------------------------------------------------------------
# Pages


def test_the_examples_of_the_game_run(capsys):
    page = (ROOT / "docs/stag_hunt_env.md").read_text()
    batched, single = re.findall(r"```python\n(.*?)```", page, re.S)
    exec(batched.replace("4096", "16"), {})
    assert "tensor" in capsys.readouterr().out
    names = {}
    exec(single, names)
    assert names["observation"]["observation"].shape == (7, 5, 4) and names["truncated"] is False
    (of_readme,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    exec(of_readme, names)
    assert set(names["rewards"]) == {f"player_{i}" for i in range(4)}


def without_code(page: Path) -> str:
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.S)


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them"""
    headings = re.findall(r"^#+ (.*)", without_code(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_resolves(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page)):
        path, _, anchor = link.partition("#")
        if not path.startswith("http"):
            target = (page.parent / path).resolve() if path else page
            assert target.exists() and target.is_relative_to(ROOT), link
            assert not anchor or anchor in anchors(target), f"{link}: {target.name} has no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_page_can_be_read(page):
    """Lines of prose fit on a screen, and nothing refers to what the reader does not have"""
    text = page.read_text()
    long = [line for line in without_code(page).splitlines() if len(line) > 120 and not line.startswith(("|", "!["))]
    assert not long, long[0]
    assert "shared/" not in text and not re.search(r"\bthe notes\b", text, re.I)
    hashes = re.findall(r"(?<![\w.#/=?])(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{7,40}(?![\w.])", text)
    assert not hashes, f"{hashes}: a commit?"


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 180


def test_every_picture_is_shown_and_small():
    shown = {
        (page.parent / link).resolve()
        for page in PAGES
        for link in re.findall(r"(?:\]\(|src=\")(\S+\.(?:png|gif))[)\"]", page.read_text())
    }
    for path in (*ROOT.glob("docs/**/*.png"), *ROOT.glob("docs/**/*.gif")):
        assert path.stat().st_size < 300_000, path
        assert path in shown or path.match("docs/results/section_*.png"), f"no page shows {path}"


def test_the_picture_of_the_loop_names_functions_of_the_script():
    names = re.findall(r'<text class="code"[^>]*>([^<]+)</text>', (ROOT / "docs/loop.svg").read_text())
    source = (ROOT / "hopplus_ppo.py").read_text()
    assert len(names) > 12
    assert {name for name in names if not re.search(rf"\b{re.escape(name)}\(", source)} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_name_stands_in_a_script(page):
    sources = "".join((ROOT / script).read_text() for script in MODULES)
    names = set(re.findall(r"`([A-Za-z]+_\w+|[A-Z][a-z]+[A-Z]\w+)`", page.read_text()))
    assert {name for name in names if not re.search(rf"\b{name}\b", sources)} == set()
