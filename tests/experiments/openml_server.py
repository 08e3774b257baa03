"""A server that speaks as much of OpenML's API as the client asks of it, on loopback, and fails on demand."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO

import pandas as pd

N_ROWS = 24
XML = 'xmlns:oml="http://openml.org/openml"'
REGRESSION, CLASSIFICATION = 2, 1

# Suites: their tasks. Tasks: type, dataset, target. Datasets: format, default target.
SUITES = {353: [101, 102, 103], 457: [103, 102], 7: [102], 8: []}
TASKS = {101: (REGRESSION, 41, "height"), 102: (CLASSIFICATION, 41, "town"), 103: (REGRESSION, 43, "y")}
DATASETS = {41: ("arff", "y"), 42: ("unchecked arff", "y"), 43: ("parquet", "y")}


def table(dataset: int) -> pd.DataFrame:
    """What a dataset holds; `id` is its row id."""
    rows = range(N_ROWS)
    return pd.DataFrame(
        {
            "id": [float(i) for i in rows],
            "height": [dataset + i / 8 for i in rows],
            "town": ["Ulm", "Bad Tölz", "Aue"] * (N_ROWS // 3),
            "y": [float(i * i) for i in rows],
        }
    )


def arff(dataset: int) -> bytes:
    columns = {"id": "REAL", "height": "REAL", "town": "{Ulm,'Bad Tölz',Aue}", "y": "REAL"}
    head = "@RELATION t\n" + "".join(f"@ATTRIBUTE {name} {kind}\n" for name, kind in columns.items())
    rows = table(dataset).itertuples(index=False)
    return (head + "@DATA\n" + "".join(f"{r.id},{r.height},'{r.town}',{r.y}\n" for r in rows)).encode()


def parquet(dataset: int) -> bytes:
    file = BytesIO()
    table(dataset).astype({"town": "category"}).to_parquet(file)
    return file.getvalue()


class Server:
    """`faults` maps a part of a path to what goes wrong there, and how often; `asked` are the paths asked for."""

    def __init__(self, http: ThreadingHTTPServer) -> None:
        self.http = http
        self.url = f"http://127.0.0.1:{http.server_address[1]}"
        self.faults: dict[str, tuple[str, int]] = {}
        self.asked: list[str] = []

    def close(self) -> None:
        """Nobody listens at the port any more."""
        self.http.shutdown()
        self.http.server_close()

    def fault(self, path: str) -> str:
        for part, (kind, times) in self.faults.items():
            if part in path and times:
                self.faults[part] = (kind, times - 1)
                return kind
        return ""

    def answer(self, path: str) -> tuple[int, bytes]:
        """Status and body. Errors are as in OpenML's own pages of error codes: status 412, and a code."""
        kind, *rest = path.removeprefix("/api/v1/xml/").strip("/").split("/")
        try:
            if path.startswith("/files/"):
                dataset = int(rest[0])
                return 200, parquet(dataset) if path.endswith(".pq") else arff(dataset)
            if kind == "estimationprocedure":
                return 200, xml(f"<oml:estimationprocedures {XML}>{PROCEDURE * 2}</oml:estimationprocedures>")
            if kind == "data" and rest[0] == "features":
                return 200, xml(f"<oml:data_features {XML}>{FEATURES}</oml:data_features>")
            if kind == "task" and rest[0] == "list":
                return self.tasks(dict(zip(rest[1::2], rest[2::2], strict=True)))
            return 200, {"study": study, "task": task, "data": self.description}[kind](int(rest[0]))
        except KeyError:
            code, what = {"study": (601, "Unknown study"), "task": (151, "Unknown task")}.get(
                kind, (111, "Unknown dataset")
            )
            return 412, error(code, what)

    def tasks(self, filters: dict[str, str]) -> tuple[int, bytes]:
        ids = [int(i) for i in filters["task_id"].split(",")] if filters["task_id"] else []
        # A dataset of the suites is deactivated by now, so that only `all` has its tasks.
        found = [i for i in ids if TASKS[i][0] == int(filters["type"]) and filters["status"] == "all"]
        if not found:
            return 412, error(482, "No results")
        return 200, xml(f"<oml:tasks {XML}>{''.join(map(listed_task, found))}</oml:tasks>")

    def description(self, dataset: int) -> bytes:
        kind, target = DATASETS[dataset]
        url = f"{self.url}/files/{dataset}/t"
        checksum = (
            f"<oml:md5_checksum>{hashlib.md5(arff(dataset)).hexdigest()}</oml:md5_checksum>" if kind == "arff" else ""
        )
        parquet_url = f"<oml:parquet_url>{url}.pq</oml:parquet_url>" if kind == "parquet" else ""
        return xml(
            f"<oml:data_set_description {XML}><oml:id>{dataset}</oml:id><oml:name>t</oml:name>"
            f"<oml:version>1</oml:version><oml:description>made up</oml:description>"
            f"<oml:format>ARFF</oml:format><oml:url>{url}.arff</oml:url>"
            f"{parquet_url}<oml:file_id>1</oml:file_id><oml:row_id_attribute>id</oml:row_id_attribute>"
            f"<oml:default_target_attribute>{target}</oml:default_target_attribute>{checksum}</oml:data_set_description>"
        )


PROCEDURE = (
    "<oml:estimationprocedure><oml:id>7</oml:id><oml:ttid>2</oml:ttid><oml:name>10-fold Crossvalidation</oml:name>"
    "<oml:type>crossvalidation</oml:type></oml:estimationprocedure>"
)
FEATURES = "".join(
    f"<oml:feature><oml:index>{i}</oml:index><oml:name>{name}</oml:name><oml:data_type>{kind}</oml:data_type></oml:feature>"
    for i, (name, kind) in enumerate({"id": "numeric", "height": "numeric", "town": "string", "y": "numeric"}.items())
)


def xml(body: str) -> bytes:
    return f'<?xml version="1.0" encoding="UTF-8"?>{body}'.encode()


def error(code: int, message: str) -> bytes:
    return xml(f"<oml:error {XML}><oml:code>{code}</oml:code><oml:message>{message}</oml:message></oml:error>")


def study(suite: int) -> bytes:
    tasks = "".join(f"<oml:task_id>{i}</oml:task_id>" for i in SUITES[suite])
    data = "".join(f"<oml:data_id>{TASKS[i][1]}</oml:data_id>" for i in SUITES[suite])
    return xml(
        f"<oml:study {XML}><oml:id>{suite}</oml:id><oml:main_entity_type>task</oml:main_entity_type>"
        "<oml:name>s</oml:name><oml:description>made up</oml:description><oml:status>active</oml:status>"
        "<oml:creation_date>2023-01-01</oml:creation_date><oml:creator>1</oml:creator>"
        + (f"<oml:data>{data}</oml:data><oml:tasks>{tasks}</oml:tasks>" if tasks else "")
        + "</oml:study>"
    )


def task(number: int) -> bytes:
    kind, dataset, target = TASKS[number]
    parameters = "".join(f'<oml:parameter name="{n}">1</oml:parameter>' for n in ("number_repeats", "number_folds"))
    return xml(
        f"<oml:task {XML}><oml:task_id>{number}</oml:task_id><oml:task_type_id>{kind}</oml:task_type_id>"
        f"<oml:task_type>Supervised {'Regression' if kind == REGRESSION else 'Classification'}</oml:task_type>"
        f'<oml:input name="source_data"><oml:data_set><oml:data_set_id>{dataset}</oml:data_set_id>'
        f"<oml:target_feature>{target}</oml:target_feature></oml:data_set></oml:input>"
        '<oml:input name="estimation_procedure"><oml:estimation_procedure><oml:type>crossvalidation</oml:type>'
        f"<oml:data_splits_url>none</oml:data_splits_url>{parameters}</oml:estimation_procedure></oml:input></oml:task>"
    )


def listed_task(number: int) -> str:
    kind, dataset, target = TASKS[number]
    return (
        f"<oml:task><oml:task_id>{number}</oml:task_id><oml:task_type_id>{kind}</oml:task_type_id>"
        f"<oml:task_type>t</oml:task_type><oml:did>{dataset}</oml:did><oml:name>t</oml:name>"
        f'<oml:status>deactivated</oml:status><oml:input name="target_feature">{target}</oml:input></oml:task>'
    )


@contextmanager
def serving() -> Iterator[Server]:
    """A running server."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = self.path.split("?")[0]
            server.asked.append(path)
            fault = server.fault(path)
            status, body = (500, b"<html><p>Internal Server Error</html>") if fault == "500" else server.answer(path)
            if fault == "dropped":
                return self.connection.close()
            if fault == "cut short":  # a whole answer by its own account
                body = body[: len(body) // 2]
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Type", "text/xml; charset=utf-8")
            self.send_header("ETag", '"1"')
            self.send_header("Last-Modified", "Mon, 02 Jan 2023 00:00:00 GMT")
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body[: len(body) // 2] if fault == "broken off" else body)

        def log_message(self, *_: object) -> None:
            pass

    server = Server(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
    threading.Thread(target=server.http.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.close()
