"""Environments for hosts in containers: each runs one command in its image."""

from envfarm.core.environment import Environment, tool
from envfarm.core.sandbox import SandboxProfile
from envfarm.core.task import Task


class InImage(Environment):
    """Runs a command."""

    executes = True
    profile = SandboxProfile(image="envfarm-test-static:1")

    def tasks(self, split):
        yield Task(id="t", prompt="go")

    @tool
    async def run(self, argv: list[str]) -> str:
        """Run it."""
        result = await self.sandbox.exec(argv)
        return f"{result.exit_code} {result.stdout.decode()}{result.stderr.decode()}"
