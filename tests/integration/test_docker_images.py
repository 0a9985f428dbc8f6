"""Images on a real engine: registries that refuse, over the real protocol, and file systems that hosts get."""

import asyncio
import http.server
import io
import json
import shutil
import subprocess
import tarfile
import threading
from pathlib import Path

import pytest

pytest.importorskip("docker")

from envfarm.core.sandbox import SandboxProfile
from envfarm.core.task import Task
from envfarm.wire.channel import connect
from envfarm.wire.convert.tasks import task_to_pb
from envfarm.wire.mux import MuxClient
from envfarm.wire.v1 import host_pb2, host_pb2_grpc, types_pb2
from sandboxes.docker.backend import DockerBackend
from sandboxes.docker.engine import Engine
from sandboxes.docker.errors import ImageError, Reason
from sandboxes.docker.images import Images, Pull
from sandboxes.docker.rewriting import rewritten

pytestmark = [pytest.mark.docker, pytest.mark.xdist_group("docker")]
STATIC = "envfarm-test-static:1"
PROGRAM = '#include <stdio.h>\nint main(int c, char **v) { printf("%d words, no shell\\n", c - 1); return 7; }\n'


class Registry(http.server.ThreadingHTTPServer):
    """Answers every manifest with ``status`` and counts how often it was asked."""

    def __init__(self, status, code):
        super().__init__(("127.0.0.1", 0), Refusal)
        self.status, self.code, self.asked = status, code, 0


class Refusal(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if "/manifests/" not in self.path:
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.server.asked += self.command == "GET"
        body = json.dumps({"errors": [{"code": self.server.code, "message": "as the test wants"}]}).encode()
        self.send_response(self.server.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *args):
        pass


@pytest.mark.parametrize(
    ("status", "code", "reason", "remedy"),
    [
        (429, "TOOMANYREQUESTS", Reason.LIMITED, "mirror"),
        (404, "MANIFEST_UNKNOWN", Reason.NOT_FOUND, "name and tag"),
        (401, "UNAUTHORIZED", Reason.DENIED, "docker login 127.0.0.1"),
    ],
)
async def test_a_registry_that_refuses_is_named_and_not_asked_again_at_once(
    docker_engine, status, code, reason, remedy
):
    engine = Engine()
    with Registry(status, code) as registry:
        thread = threading.Thread(target=registry.serve_forever)
        thread.start()
        try:
            name = f"127.0.0.1:{registry.server_port}/some/image:1"
            images = Images(engine, Pull.MISSING)
            with pytest.raises(ImageError, match=remedy) as first:
                await images.get(name)
            assert first.value.reason is reason
            assert name in str(first.value)
            asked = registry.asked
            with pytest.raises(ImageError) as second:
                await images.get(name)
            assert registry.asked == asked
            assert 0 < second.value.retry_after_s <= first.value.retry_after_s
        finally:
            registry.shutdown()
            thread.join()
            engine.close()


async def test_an_image_that_must_not_be_pulled_is_said_to_be_absent(docker_engine):
    engine = Engine()
    with pytest.raises(ImageError, match="docker load") as raised:
        await Images(engine, Pull.NEVER).get("envfarm-test-nowhere:1")
    assert raised.value.reason is Reason.ABSENT
    engine.close()


def test_files_of_an_image_belong_to_the_host_and_can_be_read_by_it():
    image = io.BytesIO()
    with tarfile.open(fileobj=image, mode="w") as tar:
        for name, mode, kind in (("root/", 0o700, tarfile.DIRTYPE), ("root/key", 0o4000, tarfile.REGTYPE)):
            entry = tarfile.TarInfo(name)
            entry.mode, entry.type, entry.size = mode, kind, 3 if kind == tarfile.REGTYPE else 0
            tar.addfile(entry, io.BytesIO(b"abc"))
        null = tarfile.TarInfo("dev/null")
        null.type = tarfile.CHRTYPE
        tar.addfile(null)
    out = b"".join(rewritten([image.getvalue()], owner=7, below="below"))
    with tarfile.open(fileobj=io.BytesIO(out)) as tar:
        assert {e.name: (e.uid, e.gid, oct(e.mode)) for e in tar} == {
            "below/root": (7, 7, "0o700"),
            "below/root/key": (7, 7, "0o600"),
        }
        assert tar.extractfile("below/root/key").read() == b"abc"


@pytest.fixture
def static_image(docker_engine, tmp_path):
    """An image of one program: no shell, no libc."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    (tmp_path / "p.c").write_text(PROGRAM)
    root = tmp_path / "image"
    root.mkdir()
    subprocess.run(["cc", "-static", "-o", root / "program", tmp_path / "p.c"], check=True, timeout=60)
    with tarfile.open(tmp_path / "image.tar", "w") as tar:
        tar.add(root, ".")
    subprocess.run(["docker", "import", tmp_path / "image.tar", STATIC], check=True, capture_output=True, timeout=60)
    yield STATIC
    docker_engine.remove_image(STATIC)


async def test_an_image_of_one_static_program_works_unchanged(static_image, host_image, tmp_path, docker_engine):
    here = Path(__file__).parent
    name = "/tests/docker_environments.py:InImage"
    backend = DockerBackend(
        tmp_path, environments=[name], slots=2, host_image=host_image, pull="never", mounts=[f"{here}:/tests"]
    )
    try:
        hosts = await backend.acquire(SandboxProfile(image=static_image))
        assert hosts.image == static_image
        assert await ran(hosts, name, ["/program", "a", "b"]) == "7 2 words, no shell\n"
    finally:
        await backend.close()
        for volume in docker_engine.volumes(filters={"label": f"envfarm.image.name={static_image}"})["Volumes"]:
            docker_engine.remove_volume(volume["Name"])


async def ran(host, environment, argv):
    channel = connect(host.address)
    stub = host_pb2_grpc.HostServiceStub(channel)
    try:
        async with asyncio.timeout(30), MuxClient("host", stub.Drive, host_pb2.DriveRequest) as mux:
            task = task_to_pb(Task(id="t", prompt="go"))
            acquire = host_pb2.AcquireSlot(episode_id="e", environment=environment, task=task, seed=1)
            await mux.call(host_pb2.SlotCommand(acquire=acquire), 20.0)
            call = types_pb2.ToolCall(id="c", name="run", arguments=json.dumps({"argv": argv}))
            step = host_pb2.RunStep(episode_id="e", index=0, digest=b"d", calls=[call], order=["c"])
            reply = await mux.call(host_pb2.SlotCommand(step=step), 20.0)
            return reply.ran.results[0].content
    finally:
        await channel.close()
