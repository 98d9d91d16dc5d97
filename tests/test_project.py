"""The files around the code: recipes, Makefile, documentation, and the weight of `import mars`."""

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

import mars
from mars.cli.main import app
from mars.training.arguments import MarsArguments, parse_arguments

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
LAUNCHERS = sorted((ROOT / "recipes" / "accelerate").glob("*.yaml"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
HEAVY = "[name for name in ('torch', 'transformers', 'datasets', 'numpy') if name in sys.modules]"


def run_python(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from typer.testing import CliRunner; from mars.cli.main import app\n"
        "for arguments in (['--help'], ['generate', '--help'], ['--version']):\n"
        "    assert CliRunner().invoke(app, arguments).exit_code == 0\n"
        f"print({HEAVY})"
    )
    assert run_python(code) == "[]\n"


def test_import_mars_is_light_and_offers_its_names():
    assert run_python(f"import sys, mars; mars.UserError; print({HEAVY})") == "[]\n"
    for name in mars.__all__:
        assert getattr(mars, name) is not None
    assert mars.__version__ == version("mars-lm")
    assert {"load", "generate", "stream", "custom_generate"} <= set(dir(mars))
    with pytest.raises(AttributeError, match="nonsense"):
        _ = mars.nonsense


def test_python_dash_m():
    done = subprocess.run(
        [sys.executable, "-m", "mars", "--version"], capture_output=True, text=True
    )
    assert done.stdout.strip() == mars.__version__


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipes_hold_valid_options(recipe):
    written = yaml.safe_load(recipe.read_text())
    args = parse_arguments([str(recipe)])
    for name, value in written.items():
        assert getattr(args, name) == value, name  # also fails for 1e-4, which YAML reads as text
    assert f"recipes/{recipe.name}" in recipe.read_text(), "says how to run it"


def test_there_are_recipes_for_every_way_to_train():
    options = [yaml.safe_load(recipe.read_text()) for recipe in RECIPES]
    assert any(o.get("masked_weight") == 0 for o in options)  # AR fine-tuning
    assert any(o.get("clean_weight") == 0 for o in options)  # the ablation
    assert any(o.get("method") == "lora" for o in options)


def test_the_paper_recipes_have_its_batch_of_384():
    for recipe in ROOT.glob("recipes/paper-*.yaml"):
        options = yaml.safe_load(recipe.read_text())
        rows = options["per_device_train_batch_size"] * options["gradient_accumulation_steps"]
        assert 8 * rows == 384, recipe.name


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda path: path.stem)
def test_accelerate_reads_its_configurations(launcher):
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    config = config_args.load_config_from_file(str(launcher))
    assert config.mixed_precision == "bf16"
    assert config.num_processes == 8


def test_no_path_of_one_machine_in_the_repository():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    private = re.compile(rf"(?<![\w.])/(?:home|Users|root|work|mnt)/|{re.escape(str(ROOT))}/")
    found = {}
    for name in names.splitlines():
        path = ROOT / name
        try:
            text = path.read_text(encoding="utf-8") if path.is_file() else ""
        except UnicodeDecodeError:
            continue  # a picture
        if match := private.search(text):
            found[name] = text[match.start() : match.start() + 60]
    assert not found


def shell_lines(page: Path) -> list[str]:
    """Return the commands in the shell blocks of a page, continuation lines joined."""
    blocks = re.findall(r"```(?:bash|sh|console)\n(.*?)```", page.read_text(), re.DOTALL)
    text = "\n".join(blocks).replace("\\\n", " ")
    return [line.strip().removeprefix("$ ").split(" #")[0] for line in text.splitlines()]


def documented(program: str) -> list[tuple[str, str]]:
    pages = [page for page in PAGES if page.is_file()]
    return [
        (page.name, line)
        for page in pages
        for line in shell_lines(page)
        if line.split()[:1] == [program]
    ]


def test_documented_commands_exist_with_their_options():
    root = get_command(app)
    lines = documented("mars")
    assert lines
    for page, line in lines:
        command, words = root, line.split("|")[0].split(">")[0].split()[1:]
        while words and hasattr(command, "commands"):
            if words[0].startswith("-"):
                break
            assert words[0] in command.commands, f"{page}: {line}"
            command = command.commands[words.pop(0)]
        known = {option for parameter in command.params for option in parameter.opts}
        if command.name in ("sft", "train"):
            known |= {f"--{name.replace('_', '-')}" for name in MarsArguments.__dataclass_fields__}
        for word in words:
            if word.startswith("--"):
                option = word.split("=")[0].replace("_", "-")
                assert option in known | {"--help"}, f"{page}: {line}"


def test_documented_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    lines = documented("make")
    assert lines
    for page, line in lines:
        targets = [word for word in line.split()[1:] if "=" not in word]
        for target in targets:
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page}: {line}"


def test_constraints_pin_every_version_exactly():
    pins = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert len(pins) > 30
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins)  # no +cpu: any build will do
    assert "torch==2.13.0" in pins
