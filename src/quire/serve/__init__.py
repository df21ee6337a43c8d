"""HTTP: the APIs that users and their tools already speak, over one engine client.

Knows: text (templates, tokens), the client side of the engine, metrics. Refuses to know: torch, scheduling, memory,
how many engines there are.
"""

from quire.serve.core.api_keys import load_keys
from quire.serve.http.app import create_admin_app, create_app, create_serving
from quire.serve.http.server import background_server, run_server

__all__ = ["background_server", "create_admin_app", "create_app", "create_serving", "load_keys", "run_server"]
