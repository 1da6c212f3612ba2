"""Tasks with Django: a message per task, sent when the transaction has committed.

    pip install django rocketmq-python-client
    tidemill topic create tasks
    tidemill group create shop --max-attempts 5
    python examples/django_tasks/manage.py migrate --run-syncdb
    python examples/django_tasks/manage.py runserver
    python examples/django_tasks/manage.py worker

Order with `curl --data customer=ada --data cups=2 http://127.0.0.1:8000/orders`.
"""

import os
import sys

from django.core.management import execute_from_command_line

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "shop.settings")
execute_from_command_line(sys.argv)
