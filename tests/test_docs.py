"""README, docs and docstrings tell the truth: commands parse, flags and metrics exist, the edits train."""

import functools
import importlib
import importlib.util
import re
import shlex
import sys
import tempfile
from pathlib import Path

import hopplus_mcts
import stag_hunt_env
from benchmarks import experiments, speed
from evaluation import adapt, evaluate, runs
from stag_hunt_env import StagHuntConfig, parse

import pytest
import torch
from helpers import TINY_RUN
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(stag_hunt_env.__file__).resolve().parent
TRAINING = ("hopplus_ppo.py", "hopplus_mcts.py")
FILES = [path for where in ("*.py", "evaluation/*.py", "benchmarks/**/*.py") for path in sorted(ROOT.glob(where))]
MODULES = {
    str(path): importlib.import_module(".".join(path.with_suffix("").parts))
    for path in (file.relative_to(ROOT) for file in FILES if "__main__" in file.read_text())
}
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")]
FOREIGN = {"--dist", "--nproc-per-node", "--nnodes", "--rdzv-backend", "--rdzv-endpoint", "--logdir", "--help"}
TINY = {
    **TINY_RUN,
    "config": StagHuntConfig(height=3, width=4, num_players=3, num_hares=3, final_time=6),
    "imagination_horizon": 4,
}


def text_of(page: Path) -> str:
    """Without commands that are there at an older commit alone"""
    return re.sub(r"^At commit .*\n", "", page.read_text(), flags=re.M)


# ---- The edits


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
    depth = -batch["weight"].unflatten(1, (state.args.imagination_horizon, -1)).log2()
    assert (depth[:, 0] == 0).all() and (depth[:, 2] == 2).any()
    assert ((depth[:, 1:] == 0) | (depth[:, 1:] == depth[:, :-1] + 1)).all() and (depth[:, 1:] == 0).any()


def check_curve(script, state, metrics):
    state.metrics.reset()
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


# ---- Commands and flags


def command_lines():
    """Every line of code in a page or in a docstring"""
    for page in PAGES:
        text = text_of(page)
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
        monkeypatch.setattr(module, "load_run", lambda args, words: None)  # there is no run
    if "--help" in words:
        return
    if "--resume" in words:
        with pytest.raises(stag_hunt_env.UserError, match=r"--resume runs/RUN.* there is no checkpoint"):
            parse_command(script, words)
        return
    parse_command(script, words)
    if "--" in words:
        hopplus_mcts.parse_args(words[words.index("--") + 1 :])


def test_experiments_that_pages_name_exist():
    for script, *words in commands():
        if script == "benchmarks/experiments.py":
            assert set(parse_command(script, words).section) <= experiments.SECTIONS.keys(), words


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
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", text_of(page)))
    assert named <= known_flags(), sorted(named - known_flags())


# ---- Metrics


@functools.cache
def logged(script: str) -> set[str]:
    """What a tiny run of a training script logs"""
    with tempfile.TemporaryDirectory() as folder:
        changes = {"num_simulations": 2} if script == "hopplus_mcts.py" else {}
        method = "hopplus-mcts" if changes else "hopplus"
        MODULES[script].main(MODULES[script].make_args(method, "cpu", **TINY, **changes, run_dir=folder))
        events = EventAccumulator(str(next(Path(folder).iterdir())))
        return set(events.Reload().Tags()["scalars"])


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
    tags = logged(script)
    for tag in sorted(tags):
        assert any(matches(documented, tag) for documented in table), f"{tag} is logged, but not documented"
    for documented in table:
        silent = documented.startswith("imagined/") and script == "hopplus_mcts.py"  # it does not imagine
        found = any(matches(documented, tag) for tag in tags)
        assert found or silent, f"{documented} is documented, but not logged"


# ---- Pages


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


def test_every_picture_is_shown_and_small():
    shown = {
        (page.parent / link).resolve()
        for page in PAGES
        for link in re.findall(r"(?:\]\(|src=\")(\S+\.(?:png|gif))[)\"]", page.read_text())
    }
    for path in (*ROOT.glob("docs/**/*.png"), *ROOT.glob("docs/**/*.gif")):
        assert path.stat().st_size < 300_000, path
        assert path in shown, f"no page shows {path}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_name_stands_in_a_script(page):
    sources = "".join((ROOT / script).read_text() for script in MODULES)
    names = set(re.findall(r"`([A-Za-z]+_\w+|[A-Z][a-z]+[A-Z]\w+)`", page.read_text()))
    assert {name for name in names if not re.search(rf"\b{name}\b", sources)} == set()
