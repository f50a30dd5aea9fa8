"""The words by which the router's rules tell one form of a question from another, in four languages.

They are the words of the form (question words, verbs of a request, names of text kinds), not of subjects.
"""

from __future__ import annotations


def any_of(*words: str) -> str:
    return f"(?:{'|'.join(words)})"


def word(*words: str) -> str:
    """Any of them as a whole word."""
    return rf"\b{any_of(*words)}\b"


HAN = r"[\u3400-\u4dbf\u4e00-\u9fff]"
NOTHING = r"(?!)"  # no text matches
SPLIT = r"(?<=[.!?;])\s+|(?<=[。？！；])|\n+"

MANY = (
    r"(?:\w+ly\s+|\w+\s+){0,4}?(?:ways|tips|steps|ideas|reasons|benefits|advantages|disadvantages|drawbacks|pros|cons|causes|effects|types|kinds|forms|examples|"
    r"strategies|factors|differences|similarities|features|symptoms|methods|techniques|suggestions|recommendations|activities|habits|skills|practices|"
    r"challenges|consequences|implications|stages|phases|principles|characteristics|aspects|options|uses|applications|roles|risks|signs|things|tools|"
    r"components|elements|parts|rules|lessons|events|qualities|concepts|topics|questions|problems|issues|solutions|arguments|mistakes|alternatives|places)\b"
)
POLITE = "^" + any_of(
    word("please|kindly|so|and|well|then|also|now"),
    r"(?:hi|hello|hey|ok|okay|thanks|hallo|hola)(?:\s+there)?[\s,!.]+(?=\w+\s+\w+\s+\w+)",
    r"(?:can|could|would|will)\s+you(?:\s+(?:please|kindly))?(?=\s+(?!be\b|feel\b|do\b|see\b|hear\b|like\b))",
    r"(?:i\s+(?:want|need)|i\s+would\s+like|i'd\s+like)\s+(?:you\s+)?to\s+(?:know|hear|see|tell\s+me)",
    r"(?:do\s+you\s+(?:have|know)|are\s+there|is\s+there)\s+(?:any|some)\b",
    rf"i(?:\s+(?:need|want|would\s+like|could\s+use|am\s+looking\s+for)|'d\s+like|'m\s+looking\s+for)\s+(?:(?:some|a\s+few)\s+)?(?={MANY}|advice\b|help\s+with\b)",
    r"(?:give|tell|show|help|let)\s+(?:me|us)\s+(?:know\s+)?(?=(?:what|how|why|which|the\s+best)\b)",
    r"help\s+(?:me|us)\s+(?:to\s+)?(?=\w)|walk\s+(?:me|us)\s+through\b",
    r"(?:in\s+your\s+opinion|generally|in\s+general)\b|请问?|麻烦",
    "你?(?:能|可以)(?:不能|否)?(?=(?:给|介绍|解释|列|比较|说明|告诉))",
    word("bitte|por favor"),
    r"(?:kannst|könntest|können|könnten)\s+(?:du|sie)(?:\s+(?:mir|uns))?(?:\s+bitte)?",
    r"(?:puedes|podrías|puede|podría)(?=\s+(?:explicar|dar|decir|enumerar|comparar|describir|recomendar))",
)

# --- code and figures: in any language ---

LANGUAGES = any_of(
    r"\bpython\b|\bjava\b|\bjavascript\b|\btypescript\b|\bc\+\+|\bc\#|\bgolang\b|\bsql\b|\bhtml\b",
    r"\bcss\b|\bbash\b|\bphp\b|\bruby\b|\bkotlin\b|\bmatlab\b|\bperl\b|\bhaskell\b|\bscala\b",
    r"\blatex\b|\bpandas\b|\bnumpy\b|\bdjango\b|\bflask\b|\bnode\.?js\b|\bdocker\b|\bpowershell\b",
    r"\bpytorch\b",
    r"\b(?:in|with|using)\s+(?:rust|swift|react|excel|r|go|c|vue|spark|bash)\b(?=\s*(?:[?.!,]|$))",
    r"\b(?:rust|swift|react|excel|git|go)\s+(?:function|program|code|component|app|hook|formula|macro|repo\w*|branch|commit|rebase|merge|stash)",
    r"\bvim\b|\bssh\b|\bmysql\b|\bpostgres\w*|\bsqlite\b|\bmongodb\b|\bnginx\b|\bchmod\b|\bgrep\b|\b(?:in|with|using)\s+(?:git|curl)\b",
    r"\bvirtualenv\b|\bpip\b|\bnpm\b|\bkubernetes\b|\bjson\b|\byaml\b|\bxml\b|\bcsv\b",
)
PROGRAMS = any_of(
    r"function|program|script|\bcode\b|snippet|\bclass\b|\bmethod\b|\bquery\b|algorithm|\bregex",
    r"regular\s+expression|unit\s+tests?\b|dockerfile|makefile|data\s+structure|\bapi\b",
    r"web\s*(?:page|site|app)|\bapp\b|linked\s+list|\barray\b|\bhash\s*(?:map|table)|\bqueue\b",
    r"\bstack\b|binary\s+(?:search|tree)|sort(?:ing)?\s+algorithm|quicksort|mergesort|recursion",
    r"\bcomponent\b|\bcommand\b|\bfunktion\b|\bprogramm\b|\bskript\b|función|programa\b|函数|程序|代码",
    "脚本|算法",
)
WRITE = any_of(
    r"\bwrite\b|\bimplement\b|\bcreate\b|\bmake\b|\bbuild\b|\bgenerate\b|\bdevelop\b|\bcode\b",
    r"\bcomplete\b|\bdebug\b|\bfix\b|\brefactor\b|\boptimi[sz]e\b|\bconvert\b|\bdesign\b",
    r"\bcorrect\b|\bschreib\w*\b|\bprogrammier\w*\b|\bescrib\w*\b|\bprograma\b|\bimplementa\b|写|编写",
    "实现|修复",
)
# What only a text with code in it has, or a question about code that is given.
CODE_GIVEN = any_of(
    r"```|`[^`]+`|^\s*(?:def|class)\s+\w+|^\s*(?:from\s+\w+\s+)?import\s+\w+|\bdef\s+\w+\s*\(",
    r"\#include\s*<|\bselect\b.+\bfrom\s+\w+|\bfunction\s+\w+\s*\(|=>|</?[a-z]+\d?(?:\s[^>]*)?>",
    r"[=!]=|\w\(\w*\)\s*[;{:]|;\s*(?:\n|$|//)|\bprint(?:f|ln)?\(|\bconsole\.log\b",
    r"\bpublic\s+(?:static|class|void)\b|\bfor\s+\w+\s+in\s+range\b",
    r"\b\w+(?:Error|Exception)\b(?=:|\s|$|\?)|\btraceback\b|\bstack\s*trace\b",
    r"\bcompil(?:e|er|ation)\b.{0,20}\berror\b",
    r"\b(?:while|if|elif|for)\b[^\n?.!]{1,40}[<>=][^\n]{0,20}:|\w\s*(?:[-+*/%|&]|<<|>>|:)=\s*\w|\bsegfault|\bsegmentation\s+fault",
    r"\b(?:stack\s+overflow|(?:foreign|primary)\s+key|http\s+request|merge\s+conflict|pull\s+request|environment\s+variable|permission\s+denied|syntax\s+error)\b|\bindex\s+out\s+of\b",
    r"\b(?:this|these|the\s+following)\s+(?:[\w+#.-]+\s+){0,2}(?:code|function|script|query|program|snippet|class|loop|regex|command|component)s?\b",
    r"\bdiese[rmns]?\s+(?:[\w-]+\s+)?[\w-]*(?:code|funktion|skript|abfrage|programm|klasse|schleife)\b|\best[ea]\s+(?:código|función|script|consulta|programa|clase|bucle)\b",
    "(?:这|下面|以下)[^。？！，]{0,8}(?:代码|函数|程序|脚本|查询)",
    # One program that is described: "a function that ...", "un script que ...".
    r"\b(?:function|script|program|query|class|method|algorithm|command|regex|funktion|skript|programm|klasse|abfrage|función|"
    r"programa|consulta|clase)\s+(?:that|which|to|called|named|die|das|der|zum|zur|que|para)\b|(?:函数|程序|脚本)[，,]?(?:来|用来|使|让|可以)",
)
# A request for code, or a question that code answers.
CODE_ASKED = any_of(
    rf"\bdifferences?\s+between\s+[^?.!]{{1,40}}\s+in\s+{LANGUAGES}",
    r"\b(?:merge|sort|reverse|iterate\s+(?:over|through)|traverse|parse|concatenate|flatten|slice|initiali[sz]e|declare|append\s+to)\b[^.?!]{0,30}\b(?:arrays?|strings?|lists?|dict(?:ionar(?:y|ies)|s)?|tuples?|dataframes?|structs?|objects|variables?)\b",
    r"\b(?:install|uninstall|compile|upgrade|configure|deploy|set\s*up|run)\b[^.?!]{0,40}\b(?:on|in|under|via|with)\s+(?:ubuntu|debian|fedora|centos|linux|windows|mac(?:os|\s+os)?|wsl|aws|azure|heroku|homebrew|brew|conda)\b",
    r"\bmy\s+(?:code|function|loop|script|query|regex|repo(?:sitory)?|dockerfile|variable)\b",
    r"\b(?:git|npm|pip|docker|kubectl|sudo|apt)\s+(?:add|commit|push|pull|rebase|merge|install|run|build|apply)\b",
    rf"{WRITE}[^.?!]{{0,60}}{PROGRAMS}",
    rf"{WRITE}[^.?!]{{0,60}}{LANGUAGES}",
    r"\bpseudo-?code\b|\bsubstring|\bpalindrom|\b(?:for|while)[\s-]loop",
    r"\b(?:an?|the|two|sorted)\s+(?:array|string|integer|list(?!\s+of\s+(?!integers|numbers|strings|ints|lists|tuples|dict))|matrix|div|tuple|pointer|struct)s?\b(?=\s+(?:of|into|in|is|and|that|s|to|with)\b|\s*[?.]?$)",
    r"\b(?:lru\s+)?cache\b|\bcommand\s+line\b|\bone-?liner\b",
)

# A question about a language, not one for a program.
ABOUT_LANGUAGES = (
    r"\b(?:differences?|compar\w+|versus|vs\.?|(?:dis)?advantages|benefits|drawbacks|pros|history|popular|career|choose|"
    r"learn(?:ing)?|teach(?:ing)?|future|use\s+cases|unterschiede?|diferencias?|区别|优缺点)\b"
)

# A request for advice, about programs as about anything else, is answered in prose. A sentence begins with a
# request for it ("Give me tips for ...", "What are common mistakes in ..."), or asks how something becomes
# better, and not how one thing is done ("How can I make a web page load faster?").
_BETTER = (
    r"(?:better|faster|slower|safer|cleaner|smaller|shorter|simpler|easier|quicker|lighter|smoother|clearer|nicer|stronger|"
    r"(?:more|less)\s+(?!than\b)\w+)\b"
)
_GOOD = (
    r"(?:clean|readable|maintainable|secure|safe|robust|reliable|scalable|accessible|efficient|testable|idiomatic|pythonic|"
    r"organi[sz]ed|consistent|high-quality|well-\w+|good|better|fast)\b"
)
ADVICE = any_of(
    r"(?:(?:give|share|list|name|suggest|offer|provide|tell|show|recommend|what|which|are|were|is|do|you|have|me|us|some|any|a|an|few|the|"
    r"of|your|main|most|common|typical|frequent|important|general|good|best|useful|practical|effective|\d+|two|three|four|five|six|seven|eight|"
    r"nine|ten)\s+){0,8}"
    r"(?:tips?|advice|(?:best|good|common)\s+practices|guidelines|suggestions|recommendations|strategies|principles|habits|mistakes|pitfalls|"
    r"(?:good|best|better|effective)\s+ways)\b",
    rf"(?:how\b|what\s+(?:can|should|could)\b)[^.?!]{{0,40}}\b(?:make|keep|get|write|build|develop)\b[^.?!]{{0,60}}\b{_BETTER}",
    rf"how\b[^.?!]{{0,30}}\b(?:make|keep|get)\b[^.?!]{{1,60}}\b{_GOOD}\s*[.?!]*$",
    rf"how\b[^.?!]{{0,30}}\b(?:write|produce|create|build)\s+{_GOOD}",
    r"(?:how\b|what\s+(?:can|should|could)\b)[^.?!]{0,30}\b(?:improve|speed\s+up|secure|protect|learn|choose|get\s+better|become)\b",
    r"how\b[^.?!]{0,30}\b(?:organi[sz]e|structure|maintain|document|manage|optimi[sz]e|test|scale)\b[^.?!]{0,30}\b"
    r"(?:projects?|code|codebases?|apps?|applications?|web\s*sites?|web\s*pages?|sites?|pages?|repositor(?:y|ies)|dependencies)\b",
    r"(?:(?:gib|nenne?|zeige?|sag|schlage?|empfiehl|was|welche\w*|sind|gibt|hast|du|es|mir|uns|ein|paar|einige|die|der|das|den|gute\w*|"
    r"beste\w*|häufig\w*|typisch\w*|wichtig\w*|nützlich\w*|\d+|zwei|drei|vier|fünf|sechs|sieben|acht|neun|zehn)\s+){0,7}"
    r"(?:tipps?|rat|ratschläge|empfehlungen|vorschläge|best\s+practices|regeln|grundsätze|prinzipien|strategien|gewohnheiten|fehler)\b",
    r"(?:wie\b|was\s+(?:kann|sollte)\b)[^.?!]{0,70}\b(?:(?<!ein\s)(?:schneller|sicherer|besser|lesbarer|sauberer|kürzer|kleiner|einfacher|effizienter|"
    r"stabiler|zuverlässiger|übersichtlicher|verständlicher)\b|(?:lesbar|sauber|wartbar|übersichtlich|verständlich)\w*|verbesser\w*|beschleunig\w*|"
    r"absicher\w*|schütz\w*|lern\w*)",
    r"[¿]?(?:(?:dame|da|danos|enumera|menciona|recomienda|cuáles|son|qué|tienes|me|los|las|unos|unas|algunos|algunas|mejores|principales|buen[oa]s|"
    r"más|comunes|útiles|\d+|dos|tres|cuatro|cinco|seis|siete|ocho|nueve|diez)\s+){0,7}"
    r"(?:consejos?|recomendaciones|sugerencias|(?:buenas|mejores)\s+prácticas|errores|estrategias|principios|hábitos|(?:buenas|mejores)\s+(?:formas|maneras))\b",
    r"[¿]?(?:cómo|qué)\b[^.?!]{0,30}\b(?:hacer|hago|haga|hagamos|lograr|logro|conseguir|escrib\w+|manten\w+|tener)\b[^.?!]{0,60}"
    r"\b(?:más\s+(?!de\b)\w+|mejor|legible|limpio|segur[oa])\b",
    r"[¿]?(?:cómo|qué)\b[^.?!]{0,30}\b(?:mejor(?:ar|o|amos)|aceler\w+|proteg\w+|aprend\w+|optimizar\s+(?:un\s+|el\s+|mi\s+|la\s+|una\s+)?(?:sitio|página|web|aplicación|código))\b",
    r"[^。？！?!]{0,30}(?:建议|技巧|最佳实践|注意事项|好习惯|常见(?:的)?错误|诀窍|窍门)",
    r"[^。？！?!]{0,12}(?:如何|怎么|怎样)[^。？！?!]{0,30}(?:更[^\s多大]|提高|提升|改善|加快|加速|保护|学习|学好|可读|易读|整洁|高质量|优雅)",
)

# A request for a text that says the same again and again.
REPEATING = any_of(
    r"\brepeat|\b(?:over|again)\s+and\s+(?:over|again)\b|\b(?:\d+|two|three|four|five|six|seven|eight|nine|ten|twenty|fifty|hundred|thousand)\s+times\b",
    r"\brefrain\b|\bchorus\b|\bsong\b|\blyrics\b|\bchant\b|\bmantra\b|\b\d+\s+copies\b",
    r"\bwiederhol|\bimmer\s+wieder\b|\d+\s*mal\b|\b(?:zwei|drei|vier|fünf|zehn|zwanzig|hundert)\s?mal\b|\blied\b|\brefrain",
    r"\brepit|\brepet|\b(?:\d+|dos|tres|cuatro|cinco|diez|veinte|cien)\s+veces\b|\bcanción\b|\bestribillo\b",
    r"重复|反复|[\d一二三四五六七八九十百]\s*[遍次]|歌",
)

# What sets things beside each other: a list of its answer names aspects, not what is true of one of them.
COMPARING = (
    any_of(
        r"\bdifferences?\b[^.?!]{0,30}\bbetween\b|\bcomparisons?\s+(?:of|between)\b|\bdiffer(?:s|ing)?\b[^.?!]{0,30}\b(?:from|in)\b",
        r"\bhow\s+(?:do|does|did)\b[^.?!]*\bdiffer\b|\s(?:vs\.?|versus)\s",
        r"\bunterschied\w*\b[^.?!]{0,30}\bzwischen\b|\bunterscheide[nt]\b[^.?!]{0,60}\b(?:von|sich)\b|\bsich\b[^.?!]{0,60}\bunterscheide[nt]\b",
        r"\bdiferencias?\b[^.?!]{0,30}\bentre\b|\bse\s+(?:diferencian?|distinguen?)\b",
        r"(?:区别|差别|差异|不同|异同)",
    ),
    any_of(
        r"(?:compare|contrast)\b(?!\s+(?:this|it|that|them)\b)|(?:make|write|give|create|provide)\s+(?:me\s+|us\s+)?(?:an?|the)\s+(?:\w+\s+)?comparison\b",
        r"vergleiche?\b|compara\b|(?:请)?(?:比较|对比)(?!好|多|少|大|小|快|慢|容易|简单|难)",
    ),
)

NUMBER = any_of(
    r"\d[\d.,]*",
    r"\b(?:two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|twenty|thirty|forty|fifty|hundred|dozen)\b",
    r"\b(?:twice|half|thrice|double|triple|quarter)\b|[两二三四五六七八九十百]",
)
QUANTITY = any_of(
    r"\bhow\s+(?:many|much|long|far|old|fast|tall|big|late|often)\b",
    r"\bwhat\s+(?:is|was|will\s+be|would\s+be|are|were)\s+(?:the|their|his|her|its)\b",
    r"\bwhat\s+(?:percent(?:age)?|fraction|number|time|age|distance)\b",
    r"\b(?:calculate|compute|determine|find)\b|\bwie\s*viele?\b|\bcuánt[oa]s?\b|多少|几[个天小时岁元]",
    "是多[少大长远]",
)
MATHS = any_of(
    r"\d\s*[-+*/×÷^=%]\s*\(?\s*\d|\b[a-z]\s*(?:\^|\*\*)\s*\d|\b\d+\s*[a-z]\s*[-+=]",
    r"[a-z]\)?\s*=\s*-?\d|\b[a-z]\s*[-+]\s*[a-z]\b|\b\d+(?:\.\d+)?\s*(?:%|percent)\s+(?:of|off)\b",
    r"\b\d+\s+(?:times|plus|minus|mal|por|más|menos|geteilt|durch|divided)\b",
    word(
        "calculate|compute|evaluate|simplify|factori[sz]e|factor|differentiate|integrate|berechne",
        "calcula|resuelve",
    )
    + r"[^?!]{0,60}\d",
    word(
        r"solve\s+(?:for|the|this)|prove\s+that|square\s+roots?|cube\s+roots?|derivative|integral",
        r"logarithms?|factorials?|primes|prime\s+numbers?|greatest\s+common\s+divisor|least\s+common\s+multiple",
        r"hypotenuse|polynomial|quadratic|probability\s+(?:of|that)|wurzel|raíz cuadrada",
    ),
    r"\b(?:area|perimeter|volume|radius|length|circumference)\b[^?!]{0,40}\b(?:circle|triangle|square|rectangle|cube|sphere|segment|cylinder)\b",
    r"\b(?:sum|product|difference|average|mean|median)\s+of\b[^?!]{0,40}\d|\bround\s+\d",
    r"\bconvert\s+\d|\bnext\s+(?:number|term)\b|\bnth\s+(?:term|number)\b|公约数|公倍数",
    r"\b(?:squared|cubed|multiples?\s+of|divisible|remainder|decimal\s+places|prime\s+factor\w*|common\s+(?:factor|denominator)|digits?)\b",
    r"\b(?:add|subtract|multiply|divide|halve|log(?:\s+base)?|sqrt|sin|cos|tan)\s*\(?\d",
    r"\bof\s+\d+(?:\.\d+)?\s*[?.]?$|\bequals?\s+(?:to\s+)?-?\d|\bdivid\w*\s+by\s+(?:zero|\d)",
    r"\b(?:numbers?|integers?|primes?|squares?|multiples?)\s+(?:below|under|above|over|up\s+to|(?:less|greater|smaller|larger)\s+than|between|from)\s+(?:zero|one|\d)",
    r"\bwhat(?:'s|\s+is|\s+are|\s+were)\s+(?:the|my|your)\s+(?:odds|chances?|likelihood|probability)\b",
    r"\b(?:one|two|three|four|five|six|seven|eight|nine|ten)\s+(?:plus|minus|times|divided\s+by)\b",
    "平方根|方程|等于|求.{0,12}(?:面积|体积|周长|导数|积分)",
)

# --- what leans on what was said before ---

FOLLOW_UP = (
    word(
        "above|previous|again|instead",
        r"your\s+(?:last|previous|answer|response|reply|list|text)|you\s+(?:said|wrote|mentioned)",
        r"(?:first|second|third|last)\s+(?:one|point|item|part|paragraph|sentence)|shorter|longer",
        r"simpler|more\s+detail|nochmal|kürzer|davon|otra vez|más corto|anterior",
    )
    + "|"
    + any_of("上面|刚才|再|前面")
)
# In a short question; in a longer one they may stand for its own words.
PRONOUNS = (
    word("it|that|this|those|these|them|they|one|ones|he|she|his|her|das|diese[rsmn]?|sie|eso|esto|ellos")
    + "|[它他她这那]"
)

# --- forms of one answer: what holds anywhere, and what a sentence begins with ---

TEXT_KINDS = any_of(
    "poem|haiku|limerick|sonnet|story|tale|song|lyrics|rap|joke|riddle|letter|e-?mail|message",
    "note|tweet|post|caption|slogan|motto|headline|title|bio|biography|speech|toast|essay|article",
    "paragraph|sentence|summary|review|script|dialogue|scene|advertisement|ad|announcement",
    "description|introduction|conclusion|abstract|template|table|name|signature|invitation|card",
    "blog|report|monologue|soliloquy|plot",
)
GIVEN_TEXT = 160  # characters behind a colon or a line's end; fewer belong to the question; not measured
GIVEN = r"(?:this|these|the\s+(?:following|given|below|above|provided)|my)"
# Forms of one answer: what a text holds anywhere, and what a sentence of it begins with.
FORMS: dict[str, tuple[str, str]] = {
    "a short answer is wanted": (
        any_of(
            r"\bin\s+(?:just\s+)?(?:one|a|a\s+single|two|a\s+few|\d+)\s+(?:words?|sentences?|lines?|paragraphs?)\b",
            r"\bone[-\s]word\b",
            r"\b(?:under|fewer\s+than|less\s+than|at\s+most|no\s+more\s+than|within)\s+(?:\d+|ten|twenty|two|three)\s+(?:words|sentences|lines|paragraphs)\b",
            r"\b(?:answer|reply|respond|explain)\s+(?:very\s+)?(?:briefly|shortly|concisely)\b|\bbriefly\b",
            r"\bkeep\s+it\s+(?:short|brief)\b",
            r"\b(?:answer|reply|respond)\s+(?:only\s+)?(?:with\s+)?(?:only\s+)?(?:yes|no|true|false|a\s+number|one)\b",
            r"\btl;?dr\b|用?一(?:句话|个词|段话)|简短|\bin\s+(?:einem|zwei)\s+(?:satz|sätzen|wort|worten)\b|\bkurz\b",
            r"\ben\s+una\s+(?:frase|palabra|línea)\b|\bbrevemente\b",
        ),
        NOTHING,
    ),
    "one text is to be written": (
        any_of(
            rf"\b(?:write|compose|draft|craft|pen)\b[^.?!]{{0,60}}\b{TEXT_KINDS}s?\b",
            r"\b(?:pretend|imagine|role-?play|picture)\b[^.?!]{0,12}\b(?:you|yourself)\b|\bact\s+as\b",
            "(?:写|作|编)(?:一|首|篇|封|个)",
            r"\bschreibe?\b[^.?!]{0,40}\b(?:gedicht|geschichte|brief|e-?mail|text|lied|aufsatz)",
            r"\bescribe\b[^.?!]{0,40}\b(?:poema|cuento|carta|correo|texto|canción|historia|ensayo)",
        ),
        any_of(
            r"(?:write|compose|draft|craft|pen)\s+(?:me\s+)?(?:an?|the|another|one|my)\b(?!\s+(?:\w+\s+)?(?:list|overview|outline|guide|checklist|comparison)\b)",
            rf"(?:suggest|recommend|give|find|create|invent|tell|make|come\s+up\s+with|think\s+of|design|provide|choose)\s+(?:me\s+|us\s+)?(?:an?|one)\s+(?:\w+\s+)?{TEXT_KINDS}\b",
            rf"prepare\s+(?:me\s+)?(?:an?|the|my)\s+(?:\w+\s+)?{TEXT_KINDS}\b",
            r"(?:sing|rhyme|pretend)\b|as\s+an?\s+[^,.?!]{3,40},|if\s+you\s+were\b|you\s+are\s+an?\b",
        ),
    ),
    "a text is to be worked on": (
        rf"[:\n]\s*\S[\s\S]{{{GIVEN_TEXT},}}|\b(?:classify|categori[sz]e|label|rate)\s+(?:it|them|each|this|these|the\s+following)\b[^.?!]{{0,40}}\bas\b"
        r"|\b(?:sentence|phrase|text|paragraph|this|it)\b[^.?!]{0,20}\bgrammatically\s+correct\b",
        any_of(
            word(
                "translate|rewrite|rephrase|paraphrase|proofread|shorten",
                r"summari[sz]e(?!\s+(?:the\s+)?(?:arguments|main|key|causes|history|differences|pros|effects|benefits))",
                "capitali[sz]e|classify|categori[sz]e|extract|transcribe|punctuate|spell|reword|condense",
                "reformat|alphabeti[sz]e|tokeni[sz]e|übersetze?|korrigiere|fasse|traduc[ei]r?|traduzca|resume",
                "corrige|reescribe",
            ),
            rf"(?:correct|edit|fix|improve|expand|continue|complete|convert|change|turn|make|put|check|simplify|read|identify|find|decide|detect|sort|order)\s+(?:all\s+|the\s+\w+\s+(?:in|of|from)\s+)?{GIVEN}\b",
            r"(?:correct|check|fix)\s+(?:the\s+)?(?:grammar|spelling|punctuation|mistakes|errors)",
            r"extract\b|how\s+do\s+(?:you|i|we)\s+(?:say|spell|pronounce)\b",
            r"what(?:\s+is|'s)\s+.{1,40}\s+in\s+(?:french|german|spanish|italian|chinese|japanese|english|latin|portuguese|russian)\b",
            r"(?:把|将).*(?:翻译|改写|改成|译成|缩写)|翻译|总结(?:一下)?(?:下面|以下|这)|改写|wie\s+sagt\s+man\b|cómo\s+se\s+dice\b",
        ),
    ),
    "one thing is asked for": (
        NOTHING,
        r"what\s+(?:should|shall|can|could|do|to|am|are)\s+(?:(?:i|we)\s+)?(?:going\s+to\s+)?\w+(?:\s+\w+)?\s+(?:tonight|today|now|tomorrow|next|this\s+(?:morning|afternoon|evening)|for\s+(?:breakfast|lunch|dinner))\s*[.?!]*$|"
        r"(?:suggest|recommend|give|tell|show|find|name|choose|pick|invent|create|design|propose|come\s+up\s+with|think\s+of)\s+(?:me\s+|us\s+)?(?:an?|one|another)\s+"
        r"(?!(?:\w+\s+)?(?:list|few|couple|overview|guide|outline|comparison|plan|breakdown|introduction|variety|range|number|checklist|summary|set|handful|dozen|lot|sense)\b)",
    ),
}
# Forms of one answer: what the last sentence of a text begins with.
LAST_FORMS: dict[str, str] = {
    "small talk": any_of(
        r"(?:hi|hello|hey|hiya|yo|sup|howdy|greetings|welcome|thanks?|thank\s+you|thx|cheers|bye|goodbye|lol|haha\w*|wow|cool|great|nice|awesome|sorry|oops|yes|no|ok|okay|sure|never\s*mind|congratulations)\b[\s\S]{0,25}$",
        r"good\s+(?:morning|afternoon|evening|night|day|job|bye)\b",
        r"happy\s+(?:birthday|new\s+year|holidays|easter)\b|merry\s+christmas\b|see\s+you\b",
        r"what'?s\s+(?:up|new|your)\b",
        r"how(?:'s|\s+is|\s+are|\s+was)\s+(?:it|you|your|life|things|everything|(?:the|my)\s+\w+\s*[?.!]*$)",
        r"how\s+do\s+you\s+(?:do|feel|know)\b|how\s+(?:do|did|does)\s+(?:i|it|this|that|my\s+\w+)\s+(?:look|sound|seem|smell|taste)\b(?!\s+(?:for|after|up|into))",
        r"why\s+(?:did|was)\s+(?:the|an?)\s+\w+[^\Ws]\s+\w+\s+(?:the|an?|its|his|her|on|off|at|up|over|out)\b[^.?!]{0,25}[.?!]*$",
        r"what\s+do\s+you\s+(?:call|get)\s+(?:an?|when|if)\b|nice\s+to\s+(?:meet|see)\b",
        r"(?:what|who|where|how|when|why|which)\b[^.?!]{0,30}\b(?:are|do|did|were|have|made|created|can)\s+you\b[^.?!]{0,25}[.?!]*$",
        r"(?:what|who)(?:'s|\s+is|\s+are|\s+was)\s+your\b",
        r"(?:tell|say)\s+(?:me\s+|us\s+)?(?:something|about\s+your(?:self)?|more\s+about\s+you)\b",
        r"who\s+(?:made|created|built|trained)\s+you\b",
        r"(?:can|do|are|will|have|did|were|would)\s+you\b[^.?!]{0,40}[.?!]*$",
        r"(?:i|i'm|i'll|i've|i\s+am)\b[^?]{0,60}$|you\s*(?:are|'re)\b[^?]{0,40}$",
        r"[^.?!]{0,40}\byourself\b",
        r"(?:what|how|who|why)\b[^.?!]{0,30}\b(?:makes?|made|keeps?|bothers?|about|of|with|to)\s+you\b[^.?!]{0,20}[.?!]*$",
        r"(?:what|how|who|where|when|why)\s+(?:do|would|did|will|are|were)\s+you\s+(?:do|like|think|feel|want|live|love|hate|prefer|know|dream|enjoy|say|come|go)\b[^.?!]{0,25}[.?!]*$",
        r"(?:what|how|who|where|when|which)\b[^.?!]{0,40}\byou\s*[.?!]*$",
        r"what(?:'s|\s+is)\s+(?:on\s+)?your\b|how(?:'s|\s+is)\s+the\s+weather\b",
        r"(?:let's|let\s+us)\s+(?:talk|chat|play)\b",
        r"what\s+(?:should|shall|can)\s+we\s+(?:talk|chat|do|play)\b[^.?!]{0,15}[.?!]*$",
        r"(?:will|would|could|can|may)\s+(?:you|i|we)\b[^.?!]{0,25}[.?!]*$",
        r"(?:that's|that\s+is|that\s+was)\b[^?]{0,30}$|(?:wish|cheer|hug|guess)\s+(?:me|what)\b",
        r"any\s+plans\b|我(?!想知道|想了解|应该|该|要怎|如何|怎)[^？?]{1,15}$",
        r"(?:ich\s+(?:bin|habe|war|fühle|mag)|me\s+siento|estoy|tengo)\b[^?]{0,40}$|was\s+machst\b",
        r"(?:sing|tell)\s+me\s+an?\b|it'?s\s+(?:me|been|so)\b[^?]{0,40}$",
        "(?:你好|您好|谢谢|再见|早上好|晚上好|晚安|哈哈|嗨|好的|没事)|你(?:是谁|叫什么|在干|在做|会什么|喜欢|觉得|今天|几岁|多大)",
        r"(?:hallo|guten\s+(?:tag|morgen|abend)|gute\s+nacht|danke|tschüss|servus|moin|grüß)\b",
        r"(?:wie\s+geht|wer\s+bist|wie\s+heißt)\b",
        r"[¡¿]?(?:hola|gracias|muchas\s+gracias|adiós|buen[oa]s\s+(?:días|tardes|noches)|qué\s+tal|cómo\s+estás|cómo\s+te\s+llamas|quién\s+eres)",
    ),
    "a short fact": any_of(
        r"(?:who|whom|whose|when)\b(?!\s+(?:are|were)\s+(?:the|some))",
        r"where\s+(?:is|was|are|were|did|does|do|was)\b",
        r"how\s+(?:many|much|long|far|old|tall|big|fast|deep|high|often|heavy|large|late|hot|cold|wide|soon)\b",
        r"(?:in\s+)?(?:what|which)\s+(?:year|time|day|date|month|colou?r|country|city|century|continent|language|planet|team|currency|number|time\s+zone|kind\s+of|type\s+of)\b",
        r"(?:what|which)\s+(?!is\b|was\b)[\w-]*[^\Ws]\s+(?:is|was|has|had|does|did)\b",
        r"what\s+does\s+.{1,40}\b(?:mean|stand\s+for)\b|what\s+happened\s+(?:on|in)\s+\d",
        r"what(?:'s|\s+is|\s+was)\s+(?:the|a|an)\s+(?:\w+\s+)?(?:capital|population|name|date|height|size|currency|symbol|chemical\s+symbol|plural|singular|opposite|synonym|antonym|definition|meaning|formula|colou?r|weight|age|temperature|price|distance|speed|year|time|largest|biggest|smallest|tallest|longest|highest|fastest|first|last|oldest|number|square|past\s+tense|abbreviation)\b",
        r"name\s+(?:the|a|an|one)\s+(?!most|main|different|various|key|major|best|top)\w+\s*\w*[.?!]*$",
        r"define\b|.*(?:谁|哪里|哪儿|哪一?年|什么时候|哪个|多少|几[个年月日]|首都)",
        r"(?:wer|wann|wo|wie\s*(?:viele?|lange|alt|hoch|groß|weit|schnell))\b",
        r"[¿]?(?:quién(?:es)?|cuándo|dónde|cuánt[oa]s?|en\s+qué\s+año|cuál\s+es\s+(?:la|el)\s+(?:capital|nombre|población))\b",
    ),
}

YES_OR_NO = any_of(
    word(
        r"is|are|was(?!\s+(?:sind|ist|kann|sollte|muss|brauch|waren|macht))|were|do|does|did|can|could",
        "should|would|will|has|have|had|may|might|must|am|shall|isn't|aren't|doesn't|don't|can't",
        "won't",
    )
    + r"[^\n]*\?\s*$",
    r".*(?:吗|是不是|对不对|能不能|可不可以)[？?]?\s*$",
    word("ist|sind|war|hat|haben|kann|können|darf|soll|sollte|muss|gibt|wird|werden") + r"[^\n]*\?\s*$",
    r"¿(?:es|son|está|están|hay|puede[ns]?|puedo|debo|debería|tiene[ns]?|ha|han|fue|era|existe)\b",
)

# A question for a cause. One explanation answers why a thing is as it is, or does what it does.
WHY = any_of(
    r"(?:(?:explain|describe)\s+(?:to\s+(?:me|us)\s+)?)?(?:why|how\s+come)(?='s|\s+\w)",
    ".*(?:为什么|为何|为啥)(?=.)",
    r"(?:erklär\w*\s*(?:mir|uns)?,?\s+)?(?:warum|weshalb|wieso)(?=\s+\w)",
    r"(?:expl[ií]ca\w*\s+)?¿?por\s+qué(?=\s+\w)",
)
# Several reasons have what people do, want or should do, what is good or bad, what grows or ends, and what
# happened.
SEVERAL_REASONS = any_of(
    word(
        "people|someone|somebody|everyone|men|women|children|kids|teenagers|students|teachers|parents|workers",
        "employees|customers|consumers|companies|businesses|firms|countries|governments|cities|schools|i|my|our",
        "should|ought|might|would|could|must|needs?|wants?|prefers?|chooses?|loves?|hates?|enjoys?|avoids?",
        "important|good|bad|better|best|worse|worst|popular|famous|useful|helpful|necessary|essential|crucial",
        "vital|valuable|beneficial|healthy|unhealthy|harmful|dangerous|risky|successful|controversial|expensive",
        r"cheap|worth|effective|recommended|matters?|(?:hard|difficult|easy)\s+(?:to|for)|so\s+(?:many|few|much)",
        "rising|falling|growing|increasing|decreasing|declining|shrinking|disappearing|dying|failing|fails?",
        r"did|was|were|why\s+ha(?:s|ve|d)|and\s+(?:why|how|what)",
    ),
    "人们|大家|我|学生|孩子|老师|父母|员工|公司|企业|国家|政府|学校|年轻人|应该|应当|要|需|必须|值得|选择|喜欢|想",
    "好|坏|有益|有害|危险|欢迎|流行|有名|著名|成功|失败|贵|便宜|难|容易|有用|有效|越来越|上涨|下降|增加|减少|消失",
    "[这那]么多|灭|亡|衰|崩|爆发|战争|革命|了",
    word(
        r"menschen|leute|jemand|kinder|jugendliche|studenten|studierende|schüler|eltern|kunden|firmen|unternehmen",
        r"länder|staaten|städte|schulen|ich|mein\w*|unser\w*|soll\w*|muss|müssen|könnte\w*|würde\w*|brauch\w*|wollen",
        r"mögen|lieben|lohnt|wichtig\w*|gut|schlecht|besser|gesund|ungesund|gefährlich|schädlich|beliebt|bekannt",
        r"berühmt|nützlich|sinnvoll|notwendig|nötig|teuer|billig|erfolgreich|schwierig|so\s+(?:viele?|wenige?)",
        r"steigen|sinken|verschwinden|sterben|war|waren|wurden?|hatten?|fiel|fielen|ging|gingen|brach|brachen",
        r"begann|verlor|verloren|endete|scheiterte|und\s+(?:warum|wie|was)",
        r"(?:aus|ab|unter|zusammen)ge\w+(?:t|en)|entstanden|(?:hat|haben)\b[^?]*\b(?:ge|ver)\w+(?:t|en)(?=\W*$)",
    ),
    word(
        "gente|personas?|alguien|niños|jóvenes|adolescentes|estudiantes|padres|empleados|clientes|empresas|países",
        r"gobiernos|ciudades|escuelas|mis?|me|nuestr[oa]s?|deb\w+|podría\w*|conviene|hay\s+que|vale\s+la\s+pena",
        r"necesit\w+|quier\w+|prefier\w+|importantes?|buen[oa]s?|bien|mal[oa]s?|mejor(?:es)?|peor(?:es)?|san[oa]s?",
        r"saludables?|popular(?:es)?|peligros[oa]s?|dañin[oa]s?|útil(?:es)?|necesari[oa]s?|esencial(?:es)?",
        r"(?:tan|es|son)\s+car[oa]s?|barat[oa]s?|famos[oa]s?|éxito|recomendables?|tant[oa]s|suben|bajan|aumentan?",
        r"desaparec\w+|fue|fueron|hubo|\w+ó|\w+(?:a|ie)ron|por\s+qué\s+han?|y\s+(?:por\s+qué|cómo|qué)",
    ),
)

# --- forms of an answer with several points ---

# A request for so many things: its number, as digits or a word; figures of time, money and size are none.
NUMBERS = {
    word: number
    for number, words in enumerate(
        (
            "two dos zwei 两 二",
            "three tres drei 三",
            "four cuatro vier 四",
            "five cinco fünf 五",
            "six seis sechs 六",
            "seven siete sieben 七",
            "eight ocho acht 八",
            "nine nueve neun 九",
            "ten diez zehn 十",
        ),
        2,
    )
    for word in words.split()
}
COUNT = rf"(?P<count>\d{{1,3}}|{any_of(*NUMBERS)})"
BEFORE_COUNT = any_of(
    word(
        "list|name|give|tell|show|suggest|recommend|provide|share|offer|write|find|mention|describe|explain|enumerate",
        r"think\s+of|come\s+up\s+with|what\s+(?:are|were)|nenne?|gib|liste|empfiehl|schlage?|zähle?|dame|nombra",
        "enumera|menciona|da|cita|recomienda|sugiere|lista|explica",
    )
    + r"\s+(?:"
    + any_of(
        r"me|us|my|the|at\s+least|exactly|about|top|best|main|mir|uns|die|las|los|al\s+menos",
        r"an?\s+(?:\w+\s+)?list\s+of",
    )
    + r"\s+){0,3}",
    r"(?:列出|列举|举出|给我|说出|介绍|推荐|提供|写出|说明|解释)",
    r"^(?:the\s+|my\s+)?(?:top\s+|best\s+)?",
)
UNIT = any_of(
    "minute|hour|day|week|month|year|percent|word|sentence|line|paragraph|dollar|euro|mile|kilomet(?:er|re)|met(?:er|re)",
    "minuten|stunde|stunden|tage|jahre|wörter|sätze|minuto|hora|día|palabra|frase|times|plus|minus|of|and|or|o'clock",
)
ASKED = rf"{BEFORE_COUNT}{COUNT}(?:\s*[个种条点项本]|\s+(?!{UNIT}s?\b)(?=[^\W\d]))"

# What a sentence says of the answer that another one asks for.
OF_THE_ANSWER = r"(?:explain|justify|show|support|describe|include|provide|defend)\s+your\b|let\s+me\s+know\b"
LIST = any_of(
    r"what\s+(?:are|were|might\s+be|could\s+be|would\s+be)\s+(?!you\b|we\b|they\b)",
    MANY,
    r"(?:what|which)\s+(?:\w+\s+){0,3}?(?!is\b|was\b|has\b|does\b)\w+s\s+(?:should|can|could|do|did|would|might|may|will|are|were|have|help|make|need|influence|affect|play|exist)\b",
    r"(?:what|how)\s+(?:should|can|could|might|would|must|do|to)\s+(?:i|we|you|one|someone|somebody|people|an?|the|my|our|[a-z]+s)\b",
    r"how\s+(?:to|might|could|can|should|does|do|did|have|has|are|is|was|were)\b",
    r"what\s+(?:makes?|made|goes\s+into|causes?|caused|factors?|challenges|skills|strategies|steps|measures|happens)\b",
    r"what(?:'s|\s+is|\s+was)\s+(?:the\s+)?(?:\w+\s+){0,2}?(?:importance|impact|role|difference|purpose|process|significance|relationship(?!\s+between\s+\w\s+and\s+\w\b)|history|structure|influence|effect)\b",
    r"(?:what(?:'s|\s+is)\s+)?(?:the\s+)?best\s+ways?\s+to\b|what\s+would\s+happen\b",
    r"what(?:'s|\s+is|\s+are)\b[^?]*\band\s+(?:why|how|what)\b",
    r"(?:plan|prepare|organi[sz]e)\s+(?:an?|the|my|for)\b",
    r"(?:come\s+up\s+with|think\s+of|suggest|recommend|find|provide|name|give|look\s+for|make|create|write|tell)\s+(?:me\s+|us\s+)?(?!an?\b|one\b|the\b|this\b|that\b|me\b|us\b)(?:[\w-]+\s+){0,4}?(?!this\b|does\b|thus\b)\w{2,}[^s\W]s\b",
    r"(?:make|create|write|give|provide|compile)\s+(?:me\s+|us\s+)?(?:an?|the)\s+(?:\w+\s+)?(?:list|overview|outline|guide|checklist|comparison)\b",
    r"summari[sz]e\b|wie\s+\w+\s+(?:man|ich|wir)\b",
    r"(?:what|in\s+(?:what|which))\s+(?:ways|respects)\b|what\s+if\b|what\s+to\s+\w{2,}",
    r"what\s+(?!size|time|day|number|visa|colou?r)\w+\s+(?:do|should|will|would|must)\s+(?:i|we|you|one|an?\s+\w+)\s+(?:need|bring|pack|take|buy|carry)\b",
    r"why\b(?!\s*\?)(?=\s+\w+\s+\w+)",
    r"(?:list|enumerate|brainstorm|outline|compare|contrast|discuss|analy[sz]e|explore|explain|describe|identify|examine|evaluate|recommend|assess|introduce)\b(?!\s+(?:this|it|that)\b)",
    r"(?:name|suggest|give|provide|share|offer|tell|show|mention|propose|plan|think\s+of|come\s+up\s+with|make\s+a\s+list|create\s+a\s+list|include)\b(?!\s+(?:it|this|that)\b)"
    rf"[^.?!]{{0,50}}\b(?:list|overview|advice|guide|plan|pros|some|several|various|different|many|few|(?:two|three|four|five|six|seven|eight|ten|\d+)|{MANY}|ideas|about)",
    r"(?:recommend|suggest|name|list)\s+(?:some|several|good|the\s+(?:top|best|main|most)|[a-z]+\s+[a-z]+s\b)",
    r"(?:an?\s+)?(?:overview|guide|introduction|advice|checklist|outline|comparison|best\s+practices|reasons|everything|guide)\b(?!\s*:)",
    r"(?:i|we|my|our)\b[^?]*[,.]\s*(?:what|how)\s+(?:should|can|could|do|would|might)\b",
    ".*(?:哪些|什么(?:好处|坏处|区别|影响|作用|原因|方法|优点|缺点|建议|特点|意义|步骤|优势)|优缺点|区别|建议|好处|注意(?:什么|事项)|几(?:点|种|个方面|条))",
    ".*(?:怎么|怎样|如何|为什么|为何)|(?:介绍|列出|列举|比较|说明|解释|分析|讨论|描述|谈谈|概述)",
    r"(?:welche|was\s+sind|was\s+waren|wie\s+(?:kann|können|sollte|könnte|bereite|funktioniert|wirk)|warum|weshalb|was\s+(?:sollte|kann|muss|muß|brauch))\b",
    r"(?:nenne?|erkläre?|beschreibe?|vergleiche?|liste|gib|empfiehl|diskutiere|erläutere?|zähle|schlage?)\b",
    r"(?:vor-?\s*und\s+nachteile|tipps|ideen|gründe|möglichkeiten)\b",
    r"[¿]?(?:cuáles\s+(?:son|fueron)|cómo\s+(?:puedo|se|podemos|puede|debo|afecta|funciona|influye)|por\s+qué|qué\s+(?:debo|debería|puedo|factores|ventajas|beneficios|consejos|pasos|tipos))\b",
    r"(?:explica|describe|compara|enumera|menciona|dame|da|recomienda|sugiere|analiza|nombra|lista)\b",
    r"(?:consejos|ideas|ventajas|formas|maneras|pros\s+y\s+contras)\b",
)
