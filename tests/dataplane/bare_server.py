"""TransferQueue's server as it comes: it gives the number of a cleared row to the next one."""

from __future__ import annotations

from dataplane import serve

serve.BALLAST = 1

if __name__ == "__main__":
    serve.main()
