"""docs/page.png, the picture of a run's page in the README. It needs `pip install selenium pillow`,
chromium and chromedriver.

    python grpo.py --task arithmetic
    python experiments/page_picture.py out/arithmetic
"""
import shutil
import sys
from pathlib import Path

from PIL import Image
from selenium import webdriver

PICTURE = Path(__file__).parents[1] / "docs" / "page.png"

options = webdriver.ChromeOptions()
options.binary_location = shutil.which("chromium") or shutil.which("google-chrome")
for flag in "--headless --no-sandbox --hide-scrollbars".split():
    options.add_argument(flag)
service = webdriver.ChromeService(shutil.which("chromedriver"))
with webdriver.Chrome(options=options, service=service) as browser:
    size = dict(width=1200, height=900, deviceScaleFactor=1, mobile=False)
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    light = {"name": "prefers-color-scheme", "value": "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [light]})
    browser.get((Path(sys.argv[1]) / "report.html").resolve().as_uri())
    size["height"] = browser.execute_script(
        "return document.getElementById('settings').offsetTop")
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.save_screenshot(PICTURE)
Image.open(PICTURE).quantize(256, Image.Quantize.MAXCOVERAGE).save(PICTURE, optimize=True)
