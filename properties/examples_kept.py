"""Where failing examples are kept between hunts, for one machine or many: a folder, or a Redis server."""

from __future__ import annotations

from pathlib import Path

from hypothesis.database import DirectoryBasedExampleDatabase, ExampleDatabase

from refmodel.errors import InvalidInput

_REDIS = ("redis://", "rediss://", "unix://")


def examples_at(place: str) -> ExampleDatabase:
    """Hypothesis's database at a folder, or at a URL such as ``redis://host:6379/0``.

    :class:`InvalidInput` if there is no server, or no client for it is installed.
    """
    if not place.startswith(_REDIS):
        return DirectoryBasedExampleDatabase(Path(place))
    try:
        from hypothesis.extra.redis import RedisExampleDatabase
        from redis import Redis
        from redis.exceptions import RedisError
    except ImportError:
        raise InvalidInput(
            "--database", expected="the package redis, for a server", received=place, fix="pip install redis"
        ) from None
    try:
        server = Redis.from_url(place)
        server.ping()
    except (RedisError, ValueError) as error:
        raise InvalidInput("--database", expected="a Redis server", received=f"{place}: {error}") from None
    return RedisExampleDatabase(server)
