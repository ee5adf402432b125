"""One line of a diagnosis, and the whole of it."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

State = Literal["ok", "not needed", "warning", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        part: Section of the report.
        name: What was looked at.
        state: "failed" makes the exit status 1.
        detail: What was found.
        remedy: What to do about it; empty when nothing needs doing.
    """

    part: str
    name: str
    state: State
    detail: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Every finding, in the order of the report."""

    findings: list[Finding] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        """Whether nothing failed."""
        return all(finding.state != "failed" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        return {"healthy": self.healthy, "findings": [asdict(finding) for finding in self.findings]}

    def render(self) -> str:
        """The report as text, a section a part."""
        lines: list[str] = []
        part = ""
        for finding in self.findings:
            if finding.part != part:
                part = finding.part
                lines += ["", part]
            lines.append(f"  {finding.state:<10} {finding.name}: {finding.detail}")
            if finding.remedy:
                lines.append(f"  {'':<10} → {finding.remedy}")
        lines += ["", "healthy" if self.healthy else "not healthy: see the lines marked failed"]
        return "\n".join(lines[1:])
