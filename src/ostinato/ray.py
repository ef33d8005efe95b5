"""Earlier place of ``ostinato.router.ray``, for one release: use that in new code."""

from ostinato.router.ray import AppSettings, PrefixRequestRouter, app

__all__ = ["AppSettings", "PrefixRequestRouter", "app"]
