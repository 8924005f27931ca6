"""What the tests use of boto3."""

from typing import Any

def client(
    service_name: str, *, region_name: str, endpoint_url: str, aws_access_key_id: str, aws_secret_access_key: str
) -> Any: ...
