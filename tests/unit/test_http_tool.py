"""HTTP that models speak to recorded and simulated endpoints."""

from __future__ import annotations

import base64
import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envfarm.core.environment import Environment
from envfarm.core.errors import ConfigError, ToolError
from envfarm.tools.schema import call_arguments, functions
from sandboxes.tools.faults import Faults
from sandboxes.tools.http import Http
from sandboxes.tools.recording import Recording, Request, Response, parsed, recording, response

RECORDED = {
    "GET https://shop.test/items": [{"name": "apple", "price": 1.5}],
    "https://shop.test/text": "hello",
    "POST https://shop.test/orders": response({"id": 7}, 201, {"Location": "/orders/7"}),
}


def http(*args: Any, seed: int = 1, environment: Environment | None = None, **arguments: Any) -> Http:
    made = Http(*args, **arguments)
    made.environment = environment or Environment()
    made.environment.seed = seed
    return made


# What a model sees


async def test_an_answer_is_shown_with_status_headers_and_body():
    text = await http(RECORDED).http_request("https://shop.test/items")
    assert text == 'HTTP/1.1 200 OK\ncontent-type: application/json\n\n[{"name":"apple","price":1.5}]'
    text = await http(RECORDED).http_request("https://shop.test/orders", "POST", json={"item": "apple"})
    assert text.startswith("HTTP/1.1 201 Created\n")
    assert "location: /orders/7\n" in text


async def test_a_head_request_shows_no_body():
    recorded = {"HEAD https://shop.test/": "never shown"}
    assert "never" not in await http(recorded).http_request("https://shop.test/", "HEAD")


async def test_a_long_body_is_cut_with_a_notice_and_between_characters():
    text = await http({"https://a.test/": "é" * 1000}, max_bytes=101).http_request("https://a.test/")
    assert text.endswith("é" * 50 + "\n[... 1899 of 2000 bytes cut ...]")


@pytest.mark.parametrize("body", [b"\x89PNG\r\n\0\0", b"\xff\xfe" * 10_000])
async def test_a_body_that_is_no_text_is_told_by_kind_and_size(body):
    answer = response(body, headers={"Content-Type": "image/png"})
    text = await http({"https://a.test/x.png": answer}).http_request("https://a.test/x.png")
    assert text.endswith(f"[binary body: image/png, {len(body)} bytes]")


async def test_a_body_is_read_in_the_charset_it_names_if_there_is_one():
    latin = response("café".encode("latin-1"), headers={"content-type": "text/html; charset=ISO-8859-1"})
    assert (await http({"https://a.test/": latin}).http_request("https://a.test/")).endswith("café")
    unknown = response(b"plain", headers={"content-type": "text/html; charset=hex"})
    assert "binary body" in await http({"https://a.test/": unknown}).http_request("https://a.test/")


# What answers


@pytest.mark.parametrize(
    "url",
    ["https://shop.test/find?b=2&a=1", "https://shop.test:443/find?a=1&b=2#part", "HTTPS://SHOP.test/find?a=1&b=2"],
)
async def test_spellings_of_one_url_are_one(url):
    assert "found" in await http({"https://shop.test/find?a=1&b=2": "found"}).http_request(url)


async def test_parameters_are_added_to_the_url():
    tool = http({"https://shop.test/find?a=1&open=true&q=x+y": "found"})
    answer = await tool.http_request("https://shop.test/find?a=1", params={"q": "x y", "open": True})
    assert "found" in answer
    assert tool.requests[0].query == {"a": "1", "q": "x y", "open": "true"}


async def test_a_recorded_body_has_to_fit_and_the_spelling_of_json_does_not_count():
    entries = [
        (Request(method="POST", url="https://a.test/", body=b'{"a": 1, "b": 2}'), response("exact")),
        (Request(method="POST", url="https://a.test/"), response("any")),
    ]
    tool = http(Recording(entries))
    assert "exact" in await tool.http_request("https://a.test/", "POST", body='{"b":2,"a":1}')
    assert "exact" in await tool.http_request("https://a.test/", "POST", json={"b": 2, "a": 1})
    assert "any" in await tool.http_request("https://a.test/", "POST", json={"b": 3})


async def test_responses_recorded_one_after_another_come_in_their_order_and_the_last_stays():
    tool = http({"https://a.test/": [response("first"), response("second", 503)]})
    answers = [await tool.http_request("https://a.test/") for _ in range(3)]
    assert [a.rpartition("\n")[2] for a in answers] == ["first", "second", "second"]
    tool.reset()
    assert "first" in await tool.http_request("https://a.test/")
    assert len(tool.requests) == 1


async def test_what_is_not_recorded_is_missing_at_known_hosts_and_out_of_reach_elsewhere():
    tool = http(RECORDED)
    assert await tool.http_request("https://shop.test/nothing") == (
        "HTTP/1.1 404 Not Found\ncontent-type: text/plain; charset=utf-8"
    )
    assert "404" in await tool.http_request("https://shop.test/items", "DELETE")
    with pytest.raises(ToolError, match=r"could not resolve host: example\.com"):
        await tool.http_request("https://example.com/")
    assert "HTTP/1.1 451" in await http(RECORDED, unknown=451).http_request("https://example.com/")


class Shop(Environment):
    """A shop with an interface over HTTP."""

    toolsets = (Http(simulated={"https://shop.test/api": lambda shop, request: shop.api(request)}),)

    def __init__(self) -> None:
        self.stock = {"apple": 3}

    def api(self, request: Request) -> Any:
        """Stock, to read and to change."""
        item = request.path.rpartition("/")[2]
        if item not in self.stock:
            return None
        if request.method == "PUT":
            self.stock[item] = request.json["units"]
        return {"item": item, "units": self.stock[item]}


async def test_an_environment_answers_as_its_own_server_with_its_own_state():
    one, two = Shop(), Shop()
    for shop in (one, two):
        shop.equip(None)  # type: ignore[arg-type]
    tool = one.toolset(Http)
    assert '{"item":"apple","units":3}' in await tool.http_request("https://shop.test/api/apple")
    assert '"units":9' in await tool.http_request("https://shop.test/api/apple", "PUT", json={"units": 9})
    assert one.stock == {"apple": 9}
    assert two.stock == {"apple": 3}
    assert [r.method for r in tool.requests] == ["GET", "PUT"]
    assert "404" in await tool.http_request("https://shop.test/api/pear")
    assert "404" in await tool.http_request("https://shop.test/apiary/apple")


async def test_the_longest_beginning_answers_and_what_is_recorded_goes_first():
    async def slow(environment: Environment, request: Request) -> str:
        return "v2"

    tool = http(
        {"https://a.test/v2/fixed": "recorded"},
        {"https://a.test/": lambda e, r: "root", "https://a.test/v2": slow, "https://a.test/none": lambda e, r: None},
    )
    wanted = {"v2/x": "v2", "v2/fixed": "recorded", "v20": "root", "none/x": "root"}
    for path, text in wanted.items():
        assert (await tool.http_request(f"https://a.test/{path}")).endswith(text), path


# Recordings in files


def test_a_har_file_is_a_recording(tmp_path: Path):
    def entry(url: str, content: dict[str, Any], **request: Any) -> dict[str, Any]:
        headers = [{"name": "Content-Encoding", "value": "gzip"}, {"name": "X-Id", "value": "5"}]
        return {
            "startedDateTime": "2026-01-01T00:00:00Z",
            "request": {"method": "GET", "url": url, "headers": [], **request},
            "response": {"status": 200, "statusText": "OK", "headers": headers, "content": content},
        }

    entries = [
        entry("https://a.test/", {"mimeType": "text/html", "text": "<p>hi"}),
        entry("https://a.test/p", {"encoding": "base64", "text": base64.b64encode(b"\0\1").decode()}),
        entry("https://a.test/q", {"text": "posted"}, method="POST", postData={"mimeType": "text/plain", "text": "x"}),
    ]
    file = tmp_path / "a.har"
    file.write_text(json.dumps({"log": {"version": "1.2", "entries": entries}}))
    made = recording(file)
    for request, body in [
        (Request(method="GET", url="https://a.test/"), b"<p>hi"),
        (Request(method="GET", url="https://a.test/p"), b"\0\1"),
        (Request(method="POST", url="https://a.test/q", body=b"x"), b"posted"),
    ]:
        key = made.find(request)
        assert key is not None
        assert made.replay(key, 0).body == body
    assert made.find(Request(method="POST", url="https://a.test/q", body=b"y")) is None
    first = made.replay(made.find(Request(method="GET", url="https://a.test/")), 0)  # type: ignore[arg-type]
    assert first.headers == {"x-id": "5", "content-type": "text/html"}


async def test_a_json_list_of_exchanges_is_a_recording(tmp_path: Path):
    file = tmp_path / "a.json"
    exchanges = [
        {"request": {"url": "https://a.test/"}, "response": {"body": {"a": 1}}},
        {
            "request": {"url": "https://a.test/b", "method": "POST", "body": "x"},
            "response": {"status": 202, "body": "ok"},
        },
        {"request": {"url": "https://a.test/c"}, "response": {"base64": base64.b64encode(b"\0").decode()}},
    ]
    file.write_text(json.dumps(exchanges))
    tool = http(str(file))
    assert '{"a":1}' in await tool.http_request("https://a.test/")
    assert "202 Accepted" in await tool.http_request("https://a.test/b", "POST", body="x")
    assert "404" in await tool.http_request("https://a.test/b", "POST", body="y")
    assert "1 bytes]" in await tool.http_request("https://a.test/c")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{", "recording .*truncated"),
        ("{}", "Expected `array`"),
        ('[{"request": {"uri": "x"}, "response": {}}]', "uri"),
        ('[{"request": {"url": "ftp://x"}, "response": {}}]', "not an absolute URL"),
        ('{"log": {"entries": [{}]}}', "request"),
    ],
)
def test_a_file_that_is_no_recording_says_what_is_wrong(tmp_path: Path, content, told):
    file = tmp_path / "a.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=told):
        Http(file)
    with pytest.raises(ConfigError, match="No such file"):
        Http(tmp_path / "none.har")


# What cannot happen


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "ftp://a.test/", "shop.test", "https://", "http://[::1", "http://a:x/"]
)
async def test_what_is_no_url_of_http_is_told(url):
    with pytest.raises(ToolError, match=r"error: .* URL"):
        await http(RECORDED).http_request(url)


async def test_no_socket_is_opened_whatever_is_asked(monkeypatch):
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    for url in ("http://127.0.0.1:22/", "http://169.254.169.254/latest/meta-data/", "http://localhost/"):
        with pytest.raises(ToolError, match="could not resolve host"):
            await http(RECORDED).http_request(url)


async def test_a_request_beyond_all_size_or_with_two_bodies_is_refused():
    with pytest.raises(ToolError, match="larger than"):
        await http(RECORDED).http_request("https://shop.test/orders", "POST", body="x" * (2 << 20))
    with pytest.raises(ToolError, match="not both"):
        await http(RECORDED).http_request("https://shop.test/orders", "POST", body="x", json=1)


async def test_what_was_asked_is_kept_within_bounds():
    tool = http(RECORDED)
    for _ in range(1100):
        await tool.http_request("https://shop.test/text")
    assert len(tool.requests) == 1000


def test_arguments_come_as_json_and_wrong_ones_are_told():
    function, _ = functions(Shop())["http_request"]
    arguments = call_arguments(function, '{"url": "https://a.test/", "json": {"a": [1]}, "params": {"n": 3}}')
    assert arguments["json"] == {"a": [1]}
    with pytest.raises(ToolError, match="method"):
        call_arguments(function, '{"url": "https://a.test/", "method": "FETCH"}')


# Faults


async def outcomes(seed: int, faults: Faults, count: int = 200) -> list[str]:
    tool = http(RECORDED, seed=seed, faults=faults)
    found = []
    for _ in range(count):
        try:
            text = await tool.http_request("https://shop.test/text")
            found.append(text.partition("\n")[0])
        except ToolError as error:
            found.append(re.sub("^error: ", "", str(error)))
    return found


async def test_faults_follow_from_the_seed_and_nothing_else():
    faults = Faults(timeouts=0.1, refused=0.1, errors=0.2)
    first = await outcomes(3, faults)
    assert first == await outcomes(3, faults)
    assert first != await outcomes(4, faults)
    assert set(first) == {
        "HTTP/1.1 200 OK",
        "HTTP/1.1 500 Internal Server Error",
        "HTTP/1.1 502 Bad Gateway",
        "HTTP/1.1 503 Service Unavailable",
        "shop.test gave no answer: timed out after 10 s",
        "failed to connect to shop.test port 443: connection refused",
    }
    assert 20 <= sum(text.startswith("HTTP/1.1 5") for text in first) <= 60


async def test_an_episode_meets_its_faults_anew_after_a_reset():
    tool = http(RECORDED, seed=5, faults=Faults(errors=0.5))
    first = [(await tool.http_request("https://shop.test/text"))[:12] for _ in range(30)]
    tool.reset()
    assert first == [(await tool.http_request("https://shop.test/text"))[:12] for _ in range(30)]


async def test_an_answer_slower_than_the_timeout_is_one_that_does_not_come():
    tool = http(RECORDED, faults=Faults(latency=(5.0, 6.0)), timeout=0.01)
    with pytest.raises(ToolError, match=r"timed out after 0\.01 s"):
        await tool.http_request("https://shop.test/text")


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**62), st.integers(0, 1000))
def test_a_drawn_fault_lies_within_what_was_asked_for(seed, index):
    fault = Faults(errors=0.5, refused=0.5, statuses=(503,), latency=(0.1, 0.2)).drawn(seed, index)
    assert fault.kind in ("status", "refused")
    assert fault.status == (503 if fault.kind == "status" else 0)
    assert 0.1 <= fault.seconds <= 0.2


@pytest.mark.parametrize(
    "wrong", [{"errors": 1.5}, {"errors": 0.6, "timeouts": 0.6}, {"latency": (2, 1)}, {"refused": -1}]
)
def test_shares_that_are_none_are_refused(wrong):
    with pytest.raises(ConfigError):
        Faults(**wrong)


@settings(deadline=None, max_examples=100)
@given(st.text(max_size=30))
def test_any_text_is_a_url_or_is_refused_kindly(text):
    for url in (text, f"https://{text}", f"https://a.test/{text}"):
        try:
            assert parsed(url).host
        except ToolError as error:
            assert str(error).startswith("error: ")  # noqa: PT017


def test_a_response_may_be_whatever_json_carries_and_nothing_else():
    assert response({"a": 1}).headers == {"content-type": "application/json"}
    assert response(Response(status=204)).status == 204
    with pytest.raises(ConfigError, match="text, bytes or JSON"):
        response(object())
