"""What the webhook of a chat gets: one line, in which nobody is called by what a script has printed."""

from __future__ import annotations

import pytest

from remote_agent.agent.hooks import DISCORD_CHARS, message

HEAD = {"job": "llama-7b", "event": "failure", "summary": "rank 3 (n2): ValueError: <!channel> & @all"}


@pytest.mark.parametrize(
    ("kind", "key", "text"),
    [
        ("slack", "text", "supervisor llama-7b: failure: rank 3 (n2): ValueError: &lt;!channel&gt; &amp; @all"),
        ("discord", "content", "supervisor llama-7b: failure: rank 3 (n2): ValueError: <!channel> & @all"),
        ("mattermost", "text", "supervisor llama-7b: failure: rank 3 (n2): ValueError: <!channel> & @\u200ball"),
    ],
)
def test_a_chat_gets_a_line_that_calls_nobody(kind: str, key: str, text: str) -> None:
    assert message(kind, HEAD)[key] == text


def test_discord_gets_no_mention_and_no_more_than_it_takes() -> None:
    found = message("discord", {**HEAD, "summary": "x" * 5000})
    assert found["allowed_mentions"] == {"parse": []}
    assert len(found["content"]) == DISCORD_CHARS


def test_an_event_without_summary_ends_with_its_name() -> None:
    assert message("slack", {**HEAD, "event": "end", "summary": ""}) == {"text": "supervisor llama-7b: end"}
