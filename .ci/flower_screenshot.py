"""Makes docs/flower.png: Flower's page of tasks while jobs run, seen by a real browser.

Starts the whole system with the instant engine at a slow step, submits jobs, and opens the page in the
system's Chromium (``$CHROMIUM``, else the first one on PATH). Exits 1 unless the page shows the id of one of
these jobs in the state STARTED.
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, Page, TimeoutError, sync_playwright

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.system import System  # noqa: E402

PICTURE = ROOT / "docs" / "flower.png"
NAMES = ("chromium", "chromium-browser", "google-chrome")
JOBS = 6
TOKENS = 1500  # half a minute at 20 ms a step
LOOKS = 20  # Flower's page does not refresh itself
FOUND = """ids => [...document.querySelectorAll('#tasks-table tbody tr')].filter(
    row => row.innerText.includes('STARTED') && ids.some(id => row.innerText.includes(id))).length"""


def main() -> int:
    executable = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if executable is None:
        sys.stderr.write(f"no browser: install {NAMES[0]} or set CHROMIUM\n")
        return 1
    with tempfile.TemporaryDirectory(prefix="promptmill-") as folder:
        data = Path(folder) / "data"
        with System(data, instant_step_ms=20) as system, sync_playwright() as playwright:
            flower = system.output("places", 30)["flower"]
            ids = [system.client.submit(f"job {n}", max_tokens=TOKENS, cache="off", priority="interactive")["id"] for n in range(JOBS)]
            for job in ids:  # wait for its first token
                next(event for event in system.client.events(job) if event["type"] == "token")
            browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox", "--headless=new"])
            found = take_picture(browser, flower, ids)
            browser.close()
            for job in ids:
                system.client.http.post(f"/v1/jobs/{job}/cancel")
    sys.stdout.write(f"{PICTURE.relative_to(ROOT)}: {found} running jobs\n" if found else "Flower showed none of the running jobs\n")
    return 0 if found else 1


def take_picture(browser: Browser, flower: str, ids: list[str]) -> int:
    """The number of our jobs that the page shows as STARTED; the picture is written if there is one."""
    page: Page = browser.new_page(viewport={"width": 1600, "height": 720})
    for _ in range(LOOKS):
        page.goto(f"{flower}/tasks")
        try:
            page.wait_for_function(FOUND, arg=ids, timeout=3000)
        except TimeoutError:
            continue
        page.screenshot(path=PICTURE)
        return int(page.evaluate(FOUND, ids))
    return 0


if __name__ == "__main__":
    sys.exit(main())
