"""What people run works behind the filter: shells, Python with processes and event loops, git, compilers, node."""

import shutil

import pytest

pytestmark = pytest.mark.containment

MULTIPROCESSING = """
import multiprocessing, multiprocessing.shared_memory
def square(x): return x * x
if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(2) as pool:
        print(sum(pool.map(square, range(10))))
    queue = multiprocessing.SimpleQueue()
    child = multiprocessing.Process(target=queue.put, args=("queued",))
    child.start(); print(queue.get()); child.join()
    shared = multiprocessing.shared_memory.SharedMemory(create=True, size=4096)
    shared.buf[0] = 7; print(shared.buf[0]); shared.close(); shared.unlink()
"""
ASYNCIO = """
import asyncio, socket
async def main():
    process = await asyncio.create_subprocess_exec("/bin/echo", "child", stdout=asyncio.subprocess.PIPE)
    print((await process.communicate())[0].decode().strip())
    async def answer(reader, writer):
        writer.write((await reader.readline()).upper()); await writer.drain(); writer.close()
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.write(b"loopback\\n"); print((await reader.readline()).decode().strip()); writer.close()
    server.close()
    left, right = socket.socketpair(); left.send(b"pair"); print(right.recv(9).decode())
    print(await asyncio.to_thread(lambda: "thread"))
asyncio.run(main())
"""
SHELL = """
set -e -o pipefail
mkfifo pipe; (echo through > pipe) & read -r word < pipe; wait; echo "$word"
cat <<END | sort | head -1
b
a
END
diff <(echo x) <(echo x) && echo same
tar cf - pipe | tar tf -
ln -s pipe link; readlink link; touch new; cp -a new copy; mv copy moved; ls moved
find . -name 'mo*' | xargs -n1 echo; date +%Y > /dev/null; script -qc true /dev/null; ps aux > /dev/null; id -u
"""


def needs(program):
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"needs {program}")


async def test_python_with_processes_and_shared_memory(run):
    result, output = await run(MULTIPROCESSING)
    assert output.split() == ["285", "queued", "7"], output
    assert result.exit_code == 0


async def test_python_with_an_event_loop(run):
    _, output = await run(ASYNCIO)
    assert output.split() == ["child", "LOOPBACK", "pair", "thread"], output


async def test_bash(sandbox):
    result = await sandbox.exec(["/bin/bash", "-c", SHELL])
    assert result.exit_code == 0, result
    assert result.stdout.decode().split() == ["through", "a", "same", "pipe", "pipe", "moved", "./moved", "65534"]


@needs("git")
async def test_git(sandbox):
    script = (
        "git init -q . && git config user.email a@b.c && git config user.name n && echo x > f && git add f && "
        "git commit -qm first && git log --oneline | wc -l && git clone -q . copy && cat copy/f && git gc -q"
    )
    result = await sandbox.exec(["/bin/sh", "-c", script])
    assert (result.exit_code, result.stdout.split()) == (0, [b"1", b"x"]), result


@needs("gcc")
async def test_a_compiler_with_threads(sandbox):
    source = b"#include <pthread.h>\n#include <stdio.h>\nstatic void *f(void *x) { puts(x); return 0; }\n"
    source += b'int main(void) { pthread_t t; return pthread_create(&t, 0, f, "ran") || pthread_join(t, 0); }\n'
    await sandbox.write("p.c", source)
    result = await sandbox.exec(["/bin/sh", "-c", "gcc -O1 -pthread p.c -o p && ./p"])
    assert (result.exit_code, result.stdout) == (0, b"ran\n"), result


@needs("node")
async def test_node(sandbox):
    code = "const {execSync} = require('child_process'); setTimeout(() => console.log(execSync('echo ran')+''), 1)"
    result = await sandbox.exec([shutil.which("node"), "--max-old-space-size=64", "-e", code])
    assert result.stdout.split() == [b"ran"], result


@needs("perl")
async def test_perl(sandbox):
    result = await sandbox.exec(["perl", "-e", "print `echo ran`; fork() or exit; wait"])
    assert result.stdout == b"ran\n", result
