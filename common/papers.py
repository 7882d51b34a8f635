"""The papers that the methods are from: one list of titles, authors, years and identifiers.

Method files, the documentation, the published tables and the pages of reproduced tables take them from here; a test
compares what they print with this list.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Paper:
    """A paper, as it is cited.

    Args:
        title: the full title.
        authors: full names, in order.
        venue: where it appeared; empty for a preprint.
        year: of the venue, or of the preprint.
        identifier: by which it is found: ``arXiv:NUMBER``, ``doi:...``, or the number of the publisher.
    """

    title: str
    authors: tuple[str, ...]
    venue: str
    year: int
    identifier: str

    @property
    def short(self) -> str:
        """First author, venue and year: ``Huang et al., CVPR 2023``."""
        return f"{self.authors[0].rpartition(' ')[2]} et al., {self.appeared}"

    @property
    def appeared(self) -> str:
        """Venue and year; the year alone of a preprint."""
        return f"{self.venue} {self.year}".strip()

    @property
    def citation(self) -> str:
        """Title, authors, venue, year and identifier, as sentences."""
        return f"{self.title}. {', '.join(self.authors)}. {self.appeared}. {self.identifier}."


NAMES: Mapping[str, str] = {
    "adcol": "ADCOL",
    "combined": "Combined",
    "fccl_plus": "FCCL+",
    "fdse": "FDSE",
    "fedadg": "FedADG",
    "fedapc": "FedAPC",
    "fedavg": "FedAvg",
    "fedbn": "FedBN",
    "feddap": "FedDAP",
    "feddg_ga": "FedDG-GA",
    "feddyn": "FedDyn",
    "fedgca": "FedGCA",
    "fedheal": "FedHEAL",
    "fedopt": "FedOpt",
    "fedpall": "FedPall",
    "fedplcc": "FedPLCC",
    "fedplvm": "FedPLVM",
    "fedproc": "FedProc",
    "fedproto": "FedProto",
    "fedprox": "FedProx",
    "fedrep": "FedRep",
    "fedsam": "FedSAM",
    "fedsr": "FedSR",
    "fpl": "FPL",
    "fpl_heal": "FPL+HEAL",
    "i2pfl": "I2PFL",
    "moon": "MOON",
    "per_fedavg": "Per-FedAvg",
    "rucr": "RUCR",
    "scaffold": "SCAFFOLD",
    "single_set": "SingleSet",
}
"""What each option of ``conf/method/`` is called in papers."""

FEDPALL = Paper(
    "FedPall: Prototype-based Adversarial and Collaborative Learning for Federated Learning with Feature Drift",
    ("Yong Zhang", "Feng Liang", "Guanghu Yuan", "Min Yang", "Chengming Li", "Xiping Hu"),
    "ICCV",
    2025,
    "arXiv:2507.04781",
)

FEDHEAL = Paper(
    "Fair Federated Learning under Domain Skew with Local Consistency and Domain Diversity",
    ("Yuhang Chen", "Wenke Huang", "Mang Ye"),
    "CVPR",
    2024,
    "arXiv:2405.16585",
)

FPL = Paper(
    "Rethinking Federated Learning with Domain Shift: A Prototype View",
    ("Wenke Huang", "Mang Ye", "Zekun Shi", "He Li", "Bo Du"),
    "CVPR",
    2023,
    "doi:10.1109/CVPR52729.2023.01565",
)

FEDBN = Paper(
    "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization",
    ("Xiaoxiao Li", "Meirui Jiang", "Xiaofei Zhang", "Michael Kamp", "Qi Dou"),
    "ICLR",
    2021,
    "arXiv:2102.07623",
)

FEDDYN = Paper(
    "Federated Learning Based on Dynamic Regularization",
    (
        "Durmus Alp Emre Acar",
        "Yue Zhao",
        "Ramon Matas Navarro",
        "Matthew Mattina",
        "Paul N. Whatmough",
        "Venkatesh Saligrama",
    ),
    "ICLR",
    2021,
    "arXiv:2111.04263",
)

PAPERS: Mapping[str, tuple[Paper, ...]] = {
    "adcol": (
        Paper(
            "Adversarial Collaborative Learning on Non-IID Features",
            ("Qinbin Li", "Bingsheng He", "Dawn Song"),
            "ICML",
            2023,
            "PMLR:v202/li23j",
        ),
    ),
    "combined": (FPL, FEDDYN, FEDBN),
    "fccl_plus": (
        Paper(
            "Generalizable Heterogeneous Federated Cross-Correlation and Instance Similarity Learning",
            ("Wenke Huang", "Mang Ye", "Zekun Shi", "Bo Du"),
            "TPAMI",
            2023,
            "arXiv:2309.16286",
        ),
    ),
    "fdse": (
        Paper(
            "Federated Learning with Domain Shift Eraser",
            ("Zheng Wang", "Zihui Wang", "Zheng Wang", "Xiaoliang Fan", "Cheng Wang"),
            "CVPR",
            2025,
            "arXiv:2503.13063",
        ),
    ),
    "fedadg": (
        Paper(
            "Federated Learning with Domain Generalization",
            ("Liling Zhang", "Xinyu Lei", "Yichun Shi", "Hongyu Huang", "Chao Chen"),
            "",
            2021,
            "arXiv:2111.10487",
        ),
    ),
    "fedapc": (
        Paper(
            "Robust Federated Learning on Edge Devices with Domain Heterogeneity",
            ("Huy Q. Le", "Latif U. Khan", "Choong Seon Hong"),
            "",
            2025,
            "arXiv:2505.10128",
        ),
    ),
    "fedavg": (
        Paper(
            "Communication-Efficient Learning of Deep Networks from Decentralized Data",
            ("H. Brendan McMahan", "Eider Moore", "Daniel Ramage", "Seth Hampson", "Blaise Agüera y Arcas"),
            "AISTATS",
            2017,
            "arXiv:1602.05629",
        ),
    ),
    "fedbn": (FEDBN,),
    "feddap": (
        Paper(
            "FedDAP: Domain-Aware Prototype Learning for Federated Learning under Domain Shift",
            ("Huy Q. Le", "Loc X. Nguyen", "Yu Qiao", "Seong Tae Kim", "Eui-Nam Huh", "Choong Seon Hong"),
            "CVPR",
            2026,
            "arXiv:2604.06795",
        ),
    ),
    "feddg_ga": (
        Paper(
            "Federated Domain Generalization with Generalization Adjustment",
            ("Ruipeng Zhang", "Qinwei Xu", "Jiangchao Yao", "Ya Zhang", "Qi Tian", "Yanfeng Wang"),
            "CVPR",
            2023,
            "OpenReview:9Bnhplqp-E",
        ),
    ),
    "feddyn": (FEDDYN,),
    "fedgca": (
        Paper(
            "FedGCA: Global Consistent Augmentation Based Single-Source Federated Domain Generalization",
            ("Yuan Liu", "Shu Wang", "Zhe Qu", "Xingyu Li", "Shichao Kan", "Jianxin Wang"),
            "ICME",
            2024,
            "arXiv:2409.14671",
        ),
    ),
    "fedheal": (FEDHEAL,),
    "fedopt": (
        Paper(
            "Adaptive Federated Optimization",
            (
                "Sashank J. Reddi",
                "Zachary Charles",
                "Manzil Zaheer",
                "Zachary Garrett",
                "Keith Rush",
                "Jakub Konečný",
                "Sanjiv Kumar",
                "H. Brendan McMahan",
            ),
            "ICLR",
            2021,
            "arXiv:2003.00295",
        ),
    ),
    "fedpall": (FEDPALL,),
    "fedplcc": (
        Paper(
            "An Enhanced Federated Prototype Learning Method under Domain Shift",
            ("Liang Kuang", "Kuangpu Guo", "Jian Liang", "Jianguo Zhang"),
            "",
            2024,
            "arXiv:2409.18578",
        ),
    ),
    "fedplvm": (
        Paper(
            "Taming Cross-Domain Representation Variance in Federated Prototype Learning with Heterogeneous Data "
            "Domains",
            ("Lei Wang", "Jieming Bian", "Letian Zhang", "Chen Chen", "Jie Xu"),
            "NeurIPS",
            2024,
            "arXiv:2403.09048",
        ),
    ),
    "fedproc": (
        Paper(
            "FedProc: Prototypical Contrastive Federated Learning on Non-IID Data",
            ("Xutong Mu", "Yulong Shen", "Ke Cheng", "Xueli Geng", "Jiaxuan Fu", "Tao Zhang", "Zhiwei Zhang"),
            "FGCS",
            2023,
            "arXiv:2109.12273",
        ),
    ),
    "fedproto": (
        Paper(
            "FedProto: Federated Prototype Learning across Heterogeneous Clients",
            ("Yue Tan", "Guodong Long", "Lu Liu", "Tianyi Zhou", "Qinghua Lu", "Jing Jiang", "Chengqi Zhang"),
            "AAAI",
            2022,
            "arXiv:2105.00243",
        ),
    ),
    "fedprox": (
        Paper(
            "Federated Optimization in Heterogeneous Networks",
            (
                "Tian Li",
                "Anit Kumar Sahu",
                "Manzil Zaheer",
                "Maziar Sanjabi",
                "Ameet Talwalkar",
                "Virginia Smith",
            ),
            "MLSys",
            2020,
            "arXiv:1812.06127",
        ),
    ),
    "fedrep": (
        Paper(
            "Exploiting Shared Representations for Personalized Federated Learning",
            ("Liam Collins", "Hamed Hassani", "Aryan Mokhtari", "Sanjay Shakkottai"),
            "ICML",
            2021,
            "arXiv:2102.07078",
        ),
    ),
    "fedsam": (
        Paper(
            "Generalized Federated Learning via Sharpness Aware Minimization",
            ("Zhe Qu", "Xingyu Li", "Rui Duan", "Yao Liu", "Bo Tang", "Zhuo Lu"),
            "ICML",
            2022,
            "arXiv:2206.02618",
        ),
        Paper(
            "Improving Generalization in Federated Learning by Seeking Flat Minima",
            ("Debora Caldarola", "Barbara Caputo", "Marco Ciccone"),
            "ECCV",
            2022,
            "arXiv:2203.11834",
        ),
    ),
    "fedsr": (
        Paper(
            "FedSR: A Simple and Effective Domain Generalization Method for Federated Learning",
            ("A. Tuan Nguyen", "Philip Torr", "Ser-Nam Lim"),
            "NeurIPS",
            2022,
            "OpenReview:mrt90D00aQX",
        ),
    ),
    "fpl": (FPL,),
    "fpl_heal": (FEDHEAL, FPL),
    "i2pfl": (
        Paper(
            "Mitigating Domain Shift in Federated Learning via Intra- and Inter-Domain Prototypes",
            (
                "Huy Q. Le",
                "Ye Lin Tun",
                "Yu Qiao",
                "Minh N. H. Nguyen",
                "Keon Oh Kim",
                "Eui-Nam Huh",
                "Choong Seon Hong",
            ),
            "",
            2025,
            "arXiv:2501.08521",
        ),
    ),
    "moon": (
        Paper(
            "Model-Contrastive Federated Learning",
            ("Qinbin Li", "Bingsheng He", "Dawn Song"),
            "CVPR",
            2021,
            "arXiv:2103.16257",
        ),
    ),
    "per_fedavg": (
        Paper(
            "Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning Approach",
            ("Alireza Fallah", "Aryan Mokhtari", "Asuman Ozdaglar"),
            "NeurIPS",
            2020,
            "arXiv:2002.07948",
        ),
    ),
    "rucr": (
        Paper(
            "Federated Learning with Long-Tailed Data via Representation Unification and Classifier Rectification",
            ("Wenke Huang", "Yuxia Liu", "Mang Ye", "Jun Chen", "Bo Du"),
            "TIFS",
            2024,
            "IEEE Xplore:10534053",
        ),
    ),
    "scaffold": (
        Paper(
            "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning",
            (
                "Sai Praneeth Karimireddy",
                "Satyen Kale",
                "Mehryar Mohri",
                "Sashank J. Reddi",
                "Sebastian U. Stich",
                "Ananda Theertha Suresh",
            ),
            "ICML",
            2020,
            "arXiv:1910.06378",
        ),
    ),
    "single_set": (FEDPALL,),
}
"""The papers of each option of ``conf/method/``; of SingleSet, a baseline without one of its own, that of its
table; of FPL+HEAL and Combined those of their parts."""


def cited(method: str) -> str:
    """Return a method's name and the citations of its papers, as a page prints them.

    Args:
        method: an option of ``conf/method/``.

    Returns:
        ``NAME: TITLE. AUTHORS. VENUE YEAR. IDENTIFIER.``, one after another where there are several papers. The name is
        left out where the first title begins with it.

    Raises:
        KeyError: the list has no such method.
    """
    name, papers = NAMES[method], PAPERS[method]
    text = " ".join(paper.citation for paper in papers)
    return text if text.startswith(f"{name}: ") else f"{name}: {text}"
