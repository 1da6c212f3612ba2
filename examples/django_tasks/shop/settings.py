"""The settings of the example. A real application has a secret key and a database server."""

import os
from pathlib import Path

SECRET_KEY = os.environ.get("SECRET_KEY", "only for this example")
DEBUG = False
ALLOWED_HOSTS = ["127.0.0.1", "localhost"]
ROOT_URLCONF = "shop.urls"
INSTALLED_APPS = ["shop"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ.get("DATABASE", Path(__file__).parents[1] / "shop.sqlite3"),
    }
}

# Of this example: where the tasks are.
TIDEMILL_ENDPOINT = os.environ.get("ENDPOINT", "127.0.0.1:8081")
TIDEMILL_TOPIC = "tasks"
TIDEMILL_GROUP = "shop"
