"""simple-websocket's client without its gap: what comes in one read with the handshake's answer is not lost."""

from simple_websocket import Client


class WebSocket(Client):
    """Its reader handles only what a further read brings; a server that says all at once and closes is never heard."""

    def _thread(self) -> None:
        self.connected = self._handle_events()
        super()._thread()
