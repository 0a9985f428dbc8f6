"""The packages of images: pinned, enough for what each role imports, in agreement with the rest of the project."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ROLES = {"gateway": (), "host": ("sandbox",), "policy": ("worker", "engine", "trainer")}


def pins(file):
    rows = [Requirement(line) for line in file.read_text().splitlines() if line.strip()]
    assert all(str(row.specifier).startswith("==") for row in rows), file
    return {canonicalize_name(row.name): str(row.specifier).removeprefix("==") for row in rows}


@pytest.mark.parametrize("role", ROLES)
def test_every_direct_dependency_of_a_role_is_pinned_within_what_the_project_allows(role):
    found = pins(ROOT / f"sandboxes/images/requirements/{role}.txt")
    wanted = [*PROJECT["dependencies"]]
    for extra in ROLES[role]:
        wanted += PROJECT["optional-dependencies"][extra]
    for requirement in map(Requirement, wanted):
        name = canonicalize_name(requirement.name)
        assert found.get(name), f"{name} is missing in {role}.txt"
        assert requirement.specifier.contains(found[name]), f"{name} {found[name]} is not {requirement.specifier}"


def test_images_have_the_versions_that_development_has():
    fixed = pins(ROOT / "constraints.txt")
    for role in ROLES:
        for name, version in pins(ROOT / f"sandboxes/images/requirements/{role}.txt").items():
            assert fixed.get(name, version) == version


def test_only_images_with_weights_have_torch():
    assert [r for r in ROLES if "torch" in pins(ROOT / f"sandboxes/images/requirements/{r}.txt")] == ["policy"]
