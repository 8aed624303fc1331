"""The server's part of `areal-bus report`: its clients, the verdict on them, the page. Imports `tools`.

`tools.report` finds this package by its name when a run has journals of a front. Begin with `clients.py`.
"""

from areal_serve.report.clients import Clients
from areal_serve.report.page import server_page
from areal_serve.report.verdict import judge_server

__all__ = ["Clients", "judge_server", "server_page"]
